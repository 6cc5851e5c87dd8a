"""What the kernel says about free memory, and the floor that a job must leave.

Source: Linux, Documentation/filesystems/proc.rst and Documentation/accounting/psi.rst.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from thor_spec.errors import PlatformError

GIB = 1 << 30
MEMINFO = Path("/proc/meminfo")
PRESSURE = Path("/proc/pressure/memory")
LEAST_FLOOR_BYTES = 4 * GIB
FLOOR_SHARE = 0.03
_READ_BYTES = 8192


class Reading(NamedTuple):
    """Memory at one moment of the monotonic clock."""

    at_s: float
    available_bytes: int
    total_bytes: int
    full_avg10: float | None  # percent of 10 s in which every task waited for memory; None without PSI


class MemorySource(Protocol):
    """Where readings come from: the kernel, or a series that a test recorded or made up."""

    def read(self) -> Reading:
        """Return memory now."""


def default_floor_bytes(total_bytes: int) -> int:
    """Return the MemAvailable that a job must leave: 4 GiB or 3 % of all memory, whichever is more."""
    return max(LEAST_FLOOR_BYTES, int(total_bytes * FLOOR_SHARE))


def parse_meminfo(text: str) -> tuple[int, int]:
    """Return ``MemAvailable`` and ``MemTotal`` in bytes from the text of ``/proc/meminfo``.

    Not ``MemFree``: the page cache is reclaimable, and a freshly loaded checkpoint fills it.

    Raises: PlatformError, if a field is missing (kernel older than 3.14, or a truncated read).
    """
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemAvailable", "MemTotal"):
            found[name] = int(rest.removesuffix("kB")) * 1024  # the kernel writes kB and means KiB
    if len(found) < 2:
        raise PlatformError(
            "/proc/meminfo has no MemAvailable or no MemTotal line; the memory guard cannot run without them. "
            "Use a kernel of 3.14 or newer, with /proc mounted."
        )
    return found["MemAvailable"], found["MemTotal"]


def parse_full_avg10(text: str) -> float | None:
    """Return the ``full avg10`` of ``/proc/pressure/memory`` in percent, or None where the text has none."""
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "full":
            values = dict(field.partition("=")[::2] for field in rest.split())
            try:
                return float(values["avg10"])
            except (KeyError, ValueError):
                return None
    return None


class ProcMemory:
    """Readings of this machine. Its descriptors stay open: opening a file takes memory of its own."""

    def __init__(
        self, meminfo: Path = MEMINFO, pressure: Path = PRESSURE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        try:
            self._meminfo = os.open(meminfo, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise PlatformError(
                f"{meminfo} cannot be read ({error.strerror}); the memory guard cannot run without it. Mount /proc."
            ) from error
        self._pressure: int | None = None
        try:
            self._pressure = os.open(pressure, os.O_RDONLY | os.O_CLOEXEC)
            os.pread(self._pressure, _READ_BYTES, 0)  # a kernel booted with psi=0 opens it and fails here
        except OSError:
            self._pressure = None

    @property
    def has_pressure(self) -> bool:
        """Whether the kernel tells how long tasks waited for memory (PSI)."""
        return self._pressure is not None

    def read(self) -> Reading:
        """Return memory now. Raises: PlatformError, as ``parse_meminfo`` does."""
        available, total = parse_meminfo(os.pread(self._meminfo, _READ_BYTES, 0).decode("ascii", "replace"))
        full = None
        if self._pressure is not None:
            try:
                full = parse_full_avg10(os.pread(self._pressure, _READ_BYTES, 0).decode("ascii", "replace"))
            except OSError:
                full = None
        return Reading(self._clock(), available, total, full)
