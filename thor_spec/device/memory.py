"""Memory as the kernel counts it, for people: each figure is None where it is missing."""

from typing import NamedTuple

_FIELDS = {"MemTotal": "total", "MemAvailable": "available", "MemFree": "free", "Cached": "cached", "SwapTotal": "swap"}


class Memory(NamedTuple):
    """Bytes. CUDA on unified memory sees ``free``; what a job may use is ``available``."""

    total: int | None = None
    available: int | None = None
    free: int | None = None
    cached: int | None = None
    swap: int | None = None

    @property
    def reclaimable(self) -> int | None:
        """Return what the page cache hides from CUDA, and drop_caches would give back."""
        return None if self.available is None or self.free is None else max(0, self.available - self.free)


def parse(text: str) -> Memory:
    """Return the figures in the text of ``/proc/meminfo``; the kernel writes kB and means KiB."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        field, value = _FIELDS.get(name), rest.strip().removesuffix("kB").strip()
        if field and value.isascii() and value.isdigit() and len(value) < 16:
            found[field] = int(value) * 1024
    return Memory(**found)
