"""Counts that an engine's process adds to and another one reads: small files of int64 in the launcher's folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def create(path: Path | None, shape: tuple[int, ...]) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return zeros [shape], int64, that are the file's content; without a file, nobody else sees them."""
    if path is None:
        return np.zeros(shape, dtype=np.int64)
    found: np.ndarray[Any, np.dtype[np.int64]]
    found = np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=shape)  # type: ignore[no-untyped-call]
    return found


def read(folder: Path | None, suffix: str) -> "Iterator[np.ndarray[Any, np.dtype[np.int64]]]":
    """Yield a copy of what each engine process has counted so far; what is just being made is left out."""
    for path in sorted(folder.glob(f"*{suffix}")) if folder else []:
        try:
            yield np.array(np.load(path, mmap_mode="r"))
        except (OSError, ValueError, EOFError):  # gone, or without its header yet
            continue
