"""Logits of a target and its drafter."""

import numpy as np
import torch

from tests.plugin.runner_kernels.batch import SLOTS, Batch, some_logits


def two_models(rng: np.random.Generator, b: Batch, vocab: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The target's logits, divided by the temperature, and the drafter's, which are like them and not divided."""
    dtype = (torch.float32, torch.bfloat16)[rng.integers(2)]
    target = some_logits(rng, b.logits, vocab + 5, dtype)
    if rng.random() < 0.5:
        return target[:, :vocab], None
    draft = torch.randn(SLOTS, b.steps, vocab, generator=torch.Generator().manual_seed(int(rng.integers(99))))
    for row, (slot, place) in enumerate(zip(b.expanded, b.local, strict=True)):
        if place < b.steps:
            scale = float(b.temperatures[slot]) or 1.0
            draft[slot, place] = draft[slot, place] * 0.3 + target[row, :vocab].float() * scale
    return target, draft.to(dtype)
