"""Every request's block and settings, by request slot, on the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thor_spec.diffusion.batched import Blocks, Rules
from thor_spec.diffusion.settings import Denoising
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin.options import DENOISE_KEYS


class Canvases:
    """Written when a request comes, and by each step of the sampler."""

    def __init__(self, slots: int, block: int, mask: int, default: Denoising, device: torch.device) -> None:
        self.block, self.mask, self.default, self.device = block, mask, default, device
        self.blocks = Blocks(
            tokens=torch.full((slots, block), mask, dtype=torch.int64, device=device),
            prompt=torch.zeros(slots, dtype=torch.int64, device=device),
            steps=torch.zeros(slots, dtype=torch.int32, device=device),
            quiet=torch.zeros(slots, dtype=torch.int32, device=device),
            stopped=torch.zeros(slots, dtype=torch.bool, device=device),
        )
        self.rules = Rules(
            threshold=torch.zeros(slots, dtype=torch.float32, device=device),
            edit_bound=torch.zeros(slots, dtype=torch.float32, device=device),
            max_steps=torch.ones(slots, dtype=torch.int32, device=device),
        )

    def add(self, slot: int, known: Sequence[int], params: Any) -> None:
        """Begin a request: ``known`` are its prompt and, after a preemption, its tokens so far."""
        settings = self._settings(params)
        tail = list(known[len(known) // self.block * self.block :])
        tokens = torch.tensor([*tail, *[self.mask] * (self.block - len(tail))], dtype=torch.int64)
        self.blocks.tokens[slot] = tokens.to(self.device, non_blocking=True)
        self.blocks.prompt[slot] = len(tail)
        self.blocks.steps[slot] = 0
        self.blocks.quiet[slot] = 0
        self.blocks.stopped[slot] = False
        self.rules.threshold[slot] = settings.threshold
        self.rules.edit_bound[slot] = settings.edit_bound
        self.rules.max_steps[slot] = settings.max_steps

    def take(self, slots: Tensor) -> tuple[Blocks, Rules]:
        """Return copies of the rows ``slots`` [R] int64."""
        b, r = self.blocks, self.rules
        return (
            Blocks(b.tokens[slots], b.prompt[slots], b.steps[slots], b.quiet[slots], b.stopped[slots]),
            Rules(r.threshold[slots], r.edit_bound[slots], r.max_steps[slots]),
        )

    def put(self, slots: Tensor, after: Blocks, settled: Tensor) -> None:
        """Write the rows back; a settled block is followed by one of masks."""
        b, goes_on = self.blocks, ~settled
        b.tokens[slots] = after.tokens.masked_fill(settled[:, None], self.mask)
        b.prompt[slots] = after.prompt * goes_on
        b.steps[slots] = after.steps * goes_on
        b.quiet[slots] = after.quiet * goes_on
        b.stopped[slots] = after.stopped & goes_on

    def _settings(self, params: Any) -> Denoising:
        extra = getattr(params, "extra_args", None) or {}
        given = {name: value for key, name in DENOISE_KEYS.items() if (value := extra.get(key)) is not None}
        try:
            return self.default.of_request(given)
        except ConfigError:  # the front door refuses these; whoever comes in by another gets the default
            return self.default
