"""What a block-diffusion model is trained to undo: masks, and wrong tokens.

A row is seen twice at once, as a damaged copy and as it is: ``[damaged ; clean]``, 2 L tokens. A damaged block sees
itself and the clean blocks before it, which is what it will see when it is decoded; a clean block sees clean blocks up
to itself. Sources: arXiv:2503.09573 (the two copies), arXiv:2512.15745 (block training), arXiv:2602.08676 (editing).

Shapes: B rows, L tokens, n = L / block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


def block_causal_mask(length: int, block: int, device: torch.device | str = "cpu") -> Tensor:
    """Return [L, L] bool: full inside a block, causal over blocks."""
    owner = torch.arange(length, device=device) // block
    return owner[:, None] >= owner[None, :]


def two_copy_mask(length: int, block: int, device: torch.device | str = "cpu") -> Tensor:
    """Return [2 L, 2 L] bool for a damaged copy followed by the clean one."""
    owner = torch.arange(length, device=device) // block
    same, earlier = owner[:, None] == owner[None, :], owner[:, None] > owner[None, :]
    damaged = torch.cat([same, earlier], dim=1)
    clean = torch.cat([torch.zeros_like(same), same | earlier], dim=1)
    return torch.cat([damaged, clean], dim=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How rows are damaged.

    Every block draws a mask rate t, uniform in [lowest, highest]; each of its tokens is masked with probability t. In
    an edited row the tokens that stayed are replaced by wrong ones at a rate drawn up to ``wrong``.
    """

    lowest: float = 0.05
    highest: float = 1.0
    edited_rows: float = 0.5
    wrong: float = 0.3


@dataclass(frozen=True, slots=True)
class Damaged:
    """A damaged copy, and what was done to it. All [B, L]."""

    ids: Tensor
    masked: Tensor
    edited: Tensor
    """Tokens that are shown and are to be confirmed or corrected: the unmasked ones of edited rows."""
    rate: Tensor
    """Mask rate of the token's block, float32."""


def damage(clean: Tensor, block: int, mask_id: int, noise: Noise, dice: torch.Generator) -> Damaged:
    """Return a damaged copy of ``clean`` [B, L] int64, drawn from ``dice``, a generator of the CPU.

    Wrong tokens are drawn from the batch itself, so that frequent tokens are frequent errors too.
    """
    batch, length = clean.shape
    blocks = length // block

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=dice).to(clean.device)

    per_block = noise.lowest + (noise.highest - noise.lowest) * draw(batch, blocks)
    rate = per_block.repeat_interleave(block, dim=1)
    masked = draw(batch, length) < rate
    edited = (draw(batch, 1) < noise.edited_rows) & ~masked
    wrong = edited & (draw(batch, length) < noise.wrong * draw(batch, blocks).repeat_interleave(block, dim=1))
    other = clean.flatten()[(draw(batch, length) * clean.numel()).long().clamp_max(clean.numel() - 1)]
    ids = torch.where(wrong, other, clean).masked_fill(masked, mask_id)
    return Damaged(ids, masked, edited, rate)


def refill(damaged: Damaged, guesses: Tensor, share: Tensor, dice: torch.Generator) -> Damaged:
    """Return ``damaged`` with part of its masks filled by a model's own guesses, which are then to be edited.

    Args:
        guesses: [B, L] int64, what the model would write.
        share: [B, 1] float32, of the masks to fill.
    """
    filled = damaged.masked & (torch.rand(damaged.ids.shape, generator=dice).to(share.device) < share)
    ids = torch.where(filled, guesses, damaged.ids)
    return Damaged(ids, damaged.masked & ~filled, damaged.edited | filled, damaged.rate)


def denoising_losses(logits: Tensor, clean: Tensor, damaged: Damaged) -> tuple[Tensor, Tensor]:
    """Return the losses of masked and of shown tokens, in nats a token; ``logits`` [B, L, V].

    Masked tokens weigh 1/t, which makes their loss a bound on the negative log likelihood of the block.
    """
    entropy = functional.cross_entropy(logits.flatten(0, 1).float(), clean.flatten(), reduction="none").view_as(clean)
    weight = damaged.masked / damaged.rate
    shown = damaged.edited.float()
    return (entropy * weight).sum() / clean.numel(), (entropy * shown).sum() / shown.sum().clamp_min(1)
