"""Benchmarks that are started beside each other: their engines start together, and what is timed is timed alone.

A start takes a minute or more of processors, a measurement seconds of the device. Each benchmark holds the lock of this
machine shared while its engines start and while it compares answers, and alone while it measures. Whoever waits keeps
those that come later waiting: else many short shares, each begun before the last one ends, would let nobody measure.
"""

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

LOCK = Path(tempfile.gettempdir()) / "thor-spec-benchmarks.lock"


def take(kind: int, lock: Path = LOCK) -> IO[Any]:
    """Wait for the lock, after those that came before; closing what is returned gives it back.

    Args:
        kind: ``fcntl.LOCK_SH``, a share of the machine; ``fcntl.LOCK_EX``, all of it.
    """
    with lock.with_suffix(".door").open("w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        file = lock.open("w")
        fcntl.flock(file, kind)
    return file


class Machine:
    """This process's share of the machine, until it has measured."""

    def __init__(self, lock: Path = LOCK) -> None:
        """Wait until nobody measures."""
        self._lock = lock
        self._held = take(fcntl.LOCK_SH, lock)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until nobody else starts engines or measures, and keep everybody waiting.

        The share is given up first: two that wait for each other's end would wait for ever.
        """
        self._held.close()
        self._held = take(fcntl.LOCK_EX, self._lock)
        try:
            yield
        finally:
            self._held.close()


def main() -> None:
    """Take the lock, and become the script: it is given back when that ends."""
    how, *script = sys.argv[1:]
    held = take({"beside": fcntl.LOCK_SH, "alone": fcntl.LOCK_EX}[how])
    os.set_inheritable(held.fileno(), True)
    os.execv(sys.executable, [sys.executable, *script])


if __name__ == "__main__":
    main()
