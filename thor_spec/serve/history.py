"""Which starts came to READY before: those find their kernels compiled, and get a shorter deadline."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

NAME = "starts.json"
KEPT = 50


def key(argv: Sequence[str], version: str) -> str:
    """Return the name of a start: the same command with the same vLLM."""
    return hashlib.sha256("\0".join([version, *argv]).encode()).hexdigest()[:16]


def was_ready(directory: Path, name: str) -> bool:
    """Return whether this start came to READY before."""
    return name in _read(directory)


def remember(directory: Path, name: str) -> None:
    """Note that this start came to READY. Failing costs a longer deadline next time, and is not told."""
    names = [name, *(other for other in _read(directory) if other != name)][:KEPT]
    with suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / NAME).write_text(json.dumps(names), encoding="utf-8")


def _read(directory: Path) -> list[str]:
    try:
        found = json.loads((directory / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
