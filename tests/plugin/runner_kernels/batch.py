"""Parts of a batch: requests in random slots, and the tensors that describe them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

SLOTS, WIDTH, POISON = 10, 96, -77
INF = float("inf")


@dataclass
class Batch:
    """Requests in random slots: whole prompts, chunks of prompts, decodes with and without drafts."""

    rng: np.random.Generator
    steps: int = 7
    size: int = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng
        self.size = int(rng.integers(1, 9))
        self.slots = rng.permutation(SLOTS)[: self.size].astype(np.int64)
        self.drafts = rng.integers(0, self.steps + 1, self.size) * (rng.random(self.size) < 0.8)
        prefilling = rng.random(self.size) < 0.4
        self.prefill_lens = rng.integers(4, 40, SLOTS).astype(np.int32)
        done = self.prefill_lens[self.slots] + rng.integers(0, 20, self.size)
        done = np.where(prefilling, rng.integers(0, self.prefill_lens[self.slots]), done)
        self.computed = rng.integers(0, 9, SLOTS).astype(np.int32)
        self.computed[self.slots] = done
        rest = self.prefill_lens[self.slots] - done
        chunk = np.maximum(rest - rng.integers(-2, 4, self.size), 1)  # ends before, at, or just after the prompt
        self.query_lens = np.where(prefilling, np.maximum(chunk, self.drafts + 1), self.drafts + 1)
        self.seq_lens = done + self.query_lens
        self.starts = np.concatenate(([0], np.cumsum(self.query_lens))).astype(np.int32)
        self.logit_starts = np.concatenate(([0], np.cumsum(self.drafts + 1))).astype(np.int32)
        self.tokens, self.logits = int(self.starts[-1]), int(self.logit_starts[-1])
        self.expanded = np.repeat(self.slots, self.drafts + 1)
        self.local = np.concatenate([np.arange(n + 1) for n in self.drafts]).astype(np.int32)
        self.temperatures = np.where(rng.random(SLOTS) < 0.4, 0.0, rng.uniform(0.3, 1.5, SLOTS)).astype(np.float32)
        self.seeds = rng.integers(-(2**63), 2**63 - 1, SLOTS)

    def positions(self) -> np.ndarray:
        lengths = zip(self.seq_lens, self.query_lens, strict=True)
        return np.concatenate([np.arange(end - length, end) for end, length in lengths]).astype(np.int64)


def to(array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(np.ascontiguousarray(array), dtype=dtype)


def poison(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else POISON, dtype=dtype)


def ints(rng: np.random.Generator, *shape: int, high: int = 300, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return to(rng.integers(1, high, shape), dtype)


def some_logits(rng: np.random.Generator, rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits as a view of a wider tensor; masked here and there, equal here and there, one row masked whole."""
    logits = np.round(rng.normal(0, 3, (rows, vocab + 7)), int(rng.integers(1, 7)))
    logits[rng.random(logits.shape) < 0.1] = -INF
    if rng.random() < 0.3:
        logits[rng.integers(rows)] = -INF
    return to(logits, dtype)[:, :vocab]


def addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)
