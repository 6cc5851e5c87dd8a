"""Memory as a test wants it: files that read like /proc, and series of readings."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from thor_spec.guard.memory import GIB, Reading
from thor_spec.guard.watchdog_handle import Sources

TOTAL_BYTES = 128_790_100 * 1024
FLOOR_BYTES = 4 * GIB
FIXTURES = Path(__file__).parent / "fixtures"


def readings(available_gib: Iterable[float], *, every_s: float = 0.25, full: float | None = None) -> Iterator[Reading]:
    """Yield one reading per value, evenly spaced."""
    for index, value in enumerate(available_gib):
        yield Reading(index * every_s, int(value * GIB), TOTAL_BYTES, full)


class FakeProc:
    """Files in place of /proc/meminfo, /proc/pressure/memory and /dev/kmsg, which a test writes while they are read."""

    def __init__(self, folder: Path, available_gib: float = 100.0) -> None:
        folder.mkdir(exist_ok=True)
        self.sources = Sources(
            meminfo=folder / "meminfo", pressure=folder / "pressure", kernel_log=folder / "kernel-log"
        )
        self.sources.kernel_log.write_text("6,1,1000,-;NVRM: an older [NV_ERR_NO_MEMORY]\n")
        self._meminfo = os.open(self.sources.meminfo, os.O_RDWR | os.O_CREAT)
        self._pressure = os.open(self.sources.pressure, os.O_RDWR | os.O_CREAT)
        self.available(available_gib)
        self.pressure(0.0)

    def available(self, gib: float) -> None:
        """Set MemAvailable; one write of constant length, so that no reader sees half of it."""
        kib = int(gib * GIB) // 1024
        os.pwrite(self._meminfo, f"MemTotal:       128790100 kB\nMemAvailable:   {kib:>9} kB\n".encode(), 0)

    def pressure(self, full: float) -> None:
        os.pwrite(self._pressure, f"full avg10={full:5.2f} avg60=0.00 avg300=0.00 total=0\n".encode(), 0)

    def kernel_says(self, line: str) -> None:
        with self.sources.kernel_log.open("a") as file:
            file.write(line + "\n")
