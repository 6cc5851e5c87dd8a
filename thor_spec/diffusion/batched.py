"""A step of many blocks at once, without a look at the host; ``decoding.Block.step`` defines it.

Shapes: R requests, B tokens of a block, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thor_spec.diffusion.settings import MAX_QUIET_STEPS


@dataclass(slots=True)
class Rules:
    """The settings of each request [R]."""

    threshold: Tensor
    edit_bound: Tensor
    max_steps: Tensor


@dataclass(slots=True)
class Blocks:
    """Where the requests' blocks are."""

    tokens: Tensor
    """[R, B] int64."""
    prompt: Tensor
    """How many of the first tokens are the prompt's [R] int64."""
    steps: Tensor
    """Steps taken [R] int32."""
    quiet: Tensor
    """Steps taken that began without masks [R] int32."""
    stopped: Tensor
    """No further step is due; what the last one wrote has yet to be stored [R] bool."""


@dataclass(slots=True)
class Stepped:
    """What a step made of the blocks."""

    blocks: Blocks
    settled: Tensor
    """The forward of this step has stored the tokens that stay [R] bool."""
    filled: Tensor
    """Masks filled [R] int64."""
    edited: Tensor
    """Tokens replaced [R] int64."""


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's likeliest token [N] int64 and its probability [N] float32; ``logits`` [N, V]."""
    best, choices = logits.max(dim=-1)
    return choices, (best.float() - logits.float().logsumexp(dim=-1)).exp()


def step(blocks: Blocks, choices: Tensor, sure: Tensor, rules: Rules, mask: int) -> Stepped:
    """Return the blocks after a step, given each position's token and its probability [R, B]."""
    before, goes_on = blocks.tokens, ~blocks.stopped
    masked = before == mask
    had_masks = masked.any(dim=1)
    fill = masked & (sure > rules.threshold[:, None])
    surest = sure.masked_fill(~masked, -1.0).argmax(dim=1, keepdim=True)
    forced = torch.zeros_like(masked).scatter(1, surest, (had_masks & ~fill.any(dim=1))[:, None])
    steps = blocks.steps + 1
    is_last = steps >= rules.max_steps
    fill = torch.where(is_last[:, None], masked, fill | forced)
    places = torch.arange(before.shape[1], device=before.device)
    editable = ~masked & (places >= blocks.prompt[:, None])
    edit = editable & (choices != before) & (sure > rules.edit_bound[:, None])
    fill, edit = fill & goes_on[:, None], edit & goes_on[:, None]
    changed = fill | edit
    quiet = blocks.quiet + (~had_masks).int()
    stop = is_last | (~had_masks & ~edit.any(dim=1)) | (quiet > MAX_QUIET_STEPS)
    is_stored = ~changed.any(dim=1)
    settled = blocks.stopped | (stop & is_stored)
    tokens = torch.where(changed, choices, before)
    after = Blocks(tokens, blocks.prompt, steps, quiet, stop & ~settled)
    return Stepped(after, settled, fill.sum(dim=1), edit.sum(dim=1))
