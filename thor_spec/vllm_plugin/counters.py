"""Counts of the engine process, read by the process that answers ``/metrics``.

The two share a small file in the launcher's folder. The engine adds on its device and copies the sums out every few
steps, without waiting for the device; a reader maps the file.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import torch

from thor_spec import env
from thor_spec.dflash.acceptance import RULES
from thor_spec.kernels.relax.reference import COUNTED

EVERY = 16  # steps between copies
_SUFFIX, _TREES = ".counts.npy", ".trees.npy"
OF_TREES = ("nodes", "depth", "accepted")
"""What is counted of each verified tree: its drafted nodes, its longest path, and the drafts that were accepted."""


class Writer:
    """The engine's end."""

    def __init__(self, path: Path | None, shape: tuple[int, ...], device: torch.device) -> None:
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        """Added to by the sampler, int64: [rules, counted, K], or of trees [what, N + 1]."""
        self._file = np.zeros(shape, dtype=np.int64)
        if path is not None:
            self._file = np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=shape)  # type: ignore[no-untyped-call]
        self._steps = 0
        self._copy = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._under_way: torch.cuda.Event | None = None

    @classmethod
    def open(cls, places: int, device: torch.device) -> Self:
        """Return a writer into the launcher's folder; where no launcher waits for us, nobody reads."""
        return cls(_file(_SUFFIX), (len(RULES), len(COUNTED), places), device)

    @classmethod
    def of_trees(cls, width: int, device: torch.device) -> Self:
        """Return the same for trees: how many there were with each number, below ``width``, of ``OF_TREES``."""
        return cls(_file(_TREES), (len(OF_TREES), width), device)

    def publish(self) -> None:
        """Copy the sums out now and then. Never waits for the device."""
        self._steps += 1
        if self.counts.device.type == "cpu":
            self._file[:] = self.counts.numpy()
            return
        if self._under_way is not None and self._under_way.query():
            self._file[:] = self._copy.numpy()
            self._under_way = None
        if self._under_way is None and self._steps % EVERY == 0:
            self._copy.copy_(self.counts, non_blocking=True)
            self._under_way = torch.cuda.Event()
            self._under_way.record()


def read() -> Iterator[np.ndarray]:
    """Yield the counts of each engine process [rules, counted, K], as far as there are any."""
    yield from _all(_SUFFIX)


def read_trees() -> Iterator[np.ndarray]:
    """Yield likewise what is counted of trees [what, N + 1]."""
    yield from _all(_TREES)


def _file(suffix: str) -> Path | None:
    folder = env.receipts_dir()
    return folder / f"{os.getpid()}{suffix}" if folder else None


def _all(suffix: str) -> Iterator[np.ndarray]:
    folder = env.receipts_dir()
    for path in sorted(folder.glob(f"*{suffix}")) if folder else []:
        try:
            yield np.array(np.load(path, mmap_mode="r"))
        except (OSError, ValueError):  # just being made
            continue
