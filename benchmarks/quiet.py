"""Benchmarks that are started beside each other: their engines start together, and what is timed is timed alone.

A start takes a minute or more of processors, a measurement seconds of the device. Each benchmark holds the lock of this
machine shared while its engines start and while it compares answers, and alone while it measures.
"""

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = Path(tempfile.gettempdir()) / "thor-spec-benchmarks.lock"


class Machine:
    """This process's share of the machine, until it has measured."""

    def __init__(self, lock: Path = LOCK) -> None:
        """Wait until nobody measures."""
        self._file = lock.open("w")
        fcntl.flock(self._file, fcntl.LOCK_SH)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody else starts engines or measures, and keep everybody waiting.

        A shared lock that becomes an exclusive one is given up for a moment: two that wait for each other's end would
        wait for ever.
        """
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def main() -> None:
    """Take the lock, and become the script: it is given back when that ends."""
    how, *script = sys.argv[1:]
    with LOCK.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        fcntl.flock(file, {"beside": fcntl.LOCK_SH, "alone": fcntl.LOCK_EX}[how])
        os.execv(sys.executable, [sys.executable, *script])


if __name__ == "__main__":
    main()
