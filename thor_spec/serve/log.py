"""The engine's log: where it goes, and reading it while it grows."""

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from thor_spec import env
from thor_spec.errors import ConfigError

KEPT = 20


def open_path(named: Path | None) -> Path:
    """Return the log file to append to, created so that a wrong path fails now. Raises: ConfigError."""
    path = named or env.cache_dir() / "logs" / f"serve-{datetime.now():%Y%m%d-%H%M%S}.log"
    try:
        if named is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            for old in sorted(path.parent.glob("serve-*.log"))[: -KEPT + 1]:
                old.unlink(missing_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise ConfigError(
            f"The log {path} cannot be written ({error.strerror}). Name another with --log-file."
        ) from error
    return path


class Tail:
    """The lines that are added to a file after the tail was made."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r", encoding="utf-8", errors="replace")
        self._file.seek(0, 2)
        self._start = self._file.tell()
        self._partial = ""

    def new_lines(self) -> Iterator[str]:
        """Yield the complete lines that arrived since the last call; a progress bar's updates count as lines."""
        self._partial += self._file.read().replace("\r", "\n")
        *lines, self._partial = self._partial.split("\n")
        yield from lines

    def all_lines(self) -> list[str]:
        """Return every line since the tail was made."""
        self._file.seek(self._start)
        return self._file.read().replace("\r", "\n").split("\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
