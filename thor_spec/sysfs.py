"""Single values of ``/proc`` and ``/sys``. What cannot be read is None, never 0."""

from contextlib import suppress
from pathlib import Path


def text(path: Path) -> str | None:
    """Return a file's text without white space and NULs around it."""
    # A gated sensor fails with EAGAIN, which Python's text layer turns into a TypeError.
    with suppress(OSError, TypeError, ValueError):
        return path.read_text(encoding="utf-8").strip(" \t\r\n\0")
    return None


def number(path: Path) -> int | None:
    """Return a file's number."""
    found = text(path)
    try:
        return int(found) if found else None
    except ValueError:
        return None
