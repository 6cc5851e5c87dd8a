"""Counts of the engine process, read by the process that answers ``/metrics``.

The engine adds on its device and copies the sums out every ``EVERY`` steps, without waiting for the device: when
traffic stops, what is read may lack the last ones until it goes on.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from thor_spec import env
from thor_spec.vllm_plugin import tables

EVERY = 16  # steps between copies
DRAFTS, DENOISING, TREES, PHASES, BUDGETS = "counts", "denoising", "trees", "phases", "budgets"
"""What is counted: drafts by rule and place [rules, counted, K]; the steps of blocks [counted]; how many trees there
were with each number of what ``kernels.tree_walk`` counts [what, N + 1]; the nanoseconds of steps with trees by phase,
and behind them their number [phases + 1]; steps by the nodes that were chosen, for trees and chains [2, N + 1]."""
DENOISING_COUNTS = {
    "forwards": "Forwards of a block that is being denoised, storing included.",
    "blocks": "Blocks that were settled.",
    "tokens": "Tokens of settled blocks; an answer may end before its last block does.",
    "fills": "Masks that became tokens.",
    "edits": "Tokens that were replaced.",
}
PHASES_OF_TREES = {
    "verify": ("begin", "verified"),
    "walk": ("verified", "walked"),
    "commit": ("commit", "committed"),
    "draft": ("draft", "drafted"),
    "build": ("drafted", "built"),
}
"""Marks between which a phase lies. ``verify`` is the target's pass with its logits, ``commit`` states and keys."""


class Writer:
    """The engine's end."""

    def __init__(self, path: Path | None, shape: tuple[int, ...], device: torch.device) -> None:
        self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
        """Added to by the sampler, int64."""
        self._file = tables.create(path, shape)
        self._steps = 0
        self._copy = torch.zeros(shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._under_way: torch.cuda.Event | None = None

    @classmethod
    def open(cls, shape: tuple[int, ...], device: torch.device, kind: str, parallel: Any) -> Self:
        """Return a writer into the launcher's folder; where no launcher waits for us, nobody reads.

        Args:
            parallel: vLLM's parallel configuration; of the devices that share each layer, the first one counts.
        """
        return cls(_path(kind, parallel), shape, device)

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


class HostWriter:
    """Likewise, for what the engine's host counts itself."""

    def __init__(self, path: Path | None, shape: tuple[int, ...]) -> None:
        self.counts = tables.create(path, shape)
        """Added to, int64; the file itself."""

    @classmethod
    def open(cls, shape: tuple[int, ...], kind: str, parallel: Any) -> Self:
        """As ``Writer.open``."""
        return cls(_path(kind, parallel), shape)


def _path(kind: str, parallel: Any) -> Path | None:
    folder, is_first = env.receipts_dir(), parallel.rank % parallel.tensor_parallel_size == 0
    return folder / f"{os.getpid()}.{kind}.npy" if folder and is_first else None


def read(kind: str) -> Iterator[np.ndarray]:
    """Yield the counts of each engine process, as far as there are any."""
    yield from tables.read(env.receipts_dir(), f".{kind}.npy")
