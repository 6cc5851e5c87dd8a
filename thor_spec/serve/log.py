"""The engine's log: where it goes, and reading it while it grows."""

import errno
import os
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Self

from thor_spec import env
from thor_spec.errors import ConfigError

KEPT = 20
LEAST_FREE_BYTES = 1 << 20
"""An engine writes less at a start; with less free, nobody could read why it failed."""


def open_path(named: Path | None, kind: str = "serve") -> Path:
    """Return the log file to append to, created so that a wrong path fails now. Raises: ConfigError.

    Args:
        named: None makes one; of those of the same ``kind`` the last ones are kept.
    """
    path = named or env.cache_dir() / "logs" / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"
    try:
        if named is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            for old in sorted(path.parent.glob(f"{kind}-*.log"))[: -KEPT + 1]:
                old.unlink(missing_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
        if is_full(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise ConfigError(
            f"The log {path} cannot be written ({error.strerror}). Name another place with --log-file, or another "
            "folder with XDG_CACHE_HOME."
        ) from error
    return path


def require_recording(path: Path | None) -> None:
    """Create the file of ``--record``, so that a wrong path fails now, not with every request. Raises: ConfigError."""
    if path is None:
        return
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise ConfigError(
            f"--record {path} cannot be written ({error.strerror}), so no request could be recorded. Name a file in a "
            "folder that exists and that you may write to."
        ) from error


def is_full(path: Path) -> bool:
    """Return whether a log has no room to grow; False for what is no regular file."""
    return path.is_file() and shutil.disk_usage(path).free < LEAST_FREE_BYTES


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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
