"""Training of a DFlash drafter on what its target writes, and the acceptance it reaches without an engine.

Recipe (arXiv:2602.06036): frozen target; continuations written by the target; random anchors in them; slot k of a block
is trained on token a + k with weight exp(-(k - 1) / gamma). Half the steps use half blocks: an engine that asks for
fewer tokens sends fewer masks, which changes what the slots see.

Shapes: B sequences, S tokens each, A anchors, b block, K drafts.
"""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from thor_spec.nano.drafter import Drafter, DrafterShape, block_mask
from thor_spec.train import data, loop
from thor_spec.train import device as device_use
from thor_spec.train.targets import Target

LOGITS = 3e8  # most numbers of one step's logits


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRecipe:
    """Sizes and numbers of a drafter's training."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 128
    block: int = 16
    taps: int = 4
    """Target layers read."""
    sequences: int = 49_152
    """Continuations written before the training; fewer, where writing takes more than ``writing_share`` of the time."""
    prompt: int = 128
    new: int = 320
    writing_batch: int = 2048
    writing_share: float = 0.3
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    """In turn, batch by batch: half the text is greedy."""
    batch: int = 64
    anchors: int = 48
    gamma: float = 7.0  # for blocks of 16; 4 for blocks of 8
    rate: float = 2e-3
    warm_up: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0


def tapped(layers: int, count: int) -> tuple[int, ...]:
    """Return ``count`` layers spread evenly up to the last: (1, 3, 5, 7) for 4 of 8.

    Published drafters stop three layers before the end of 36 or more; in a small target that would leave out what it
    knows best.
    """
    return tuple(layers * (i + 1) // count - 1 for i in range(count))


def shape_for(target: Target, recipe: DraftRecipe, *, mask_token_id: int, max_length: int) -> DrafterShape:
    """Return the drafter's shape."""
    return DrafterShape(
        vocabulary=target.embedding.shape[0],
        hidden=target.hidden,
        target_layers=target.layers,
        target_layer_ids=tapped(target.layers, recipe.taps),
        mask_token_id=mask_token_id,
        block_size=recipe.block,
        layers=recipe.layers,
        heads=recipe.heads,
        kv_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        intermediate=recipe.intermediate,
        max_length=max_length,
    )


def products_per_slot(shape: DrafterShape) -> int:
    """Return multiply-adds per drafted token, the target's head included, attention over the context not."""
    attention = shape.hidden * shape.head_dim * 2 * (shape.heads + shape.kv_heads)
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate) + shape.hidden * shape.vocabulary


def products_per_context_token(shape: DrafterShape) -> int:
    """Return multiply-adds spent once on every accepted token: its features, and their keys and values."""
    features = len(shape.target_layer_ids) * shape.hidden**2
    return features + shape.layers * 2 * shape.hidden * shape.kv_heads * shape.head_dim


def write_pool(
    target: Target, ids: Tensor, recipe: DraftRecipe, seed: int, deadline: float | None, say: loop.Say
) -> Tensor:
    """Return [N, prompt + new] int32 on the CPU: continuations of windows of ``ids``, until ``deadline`` at most."""
    batches = math.ceil(recipe.sequences / recipe.writing_batch)
    pool: list[Tensor] = []
    for index in range(batches):
        if deadline is not None and pool and time.monotonic() > deadline:
            break
        count = min(recipe.writing_batch, recipe.sequences - index * recipe.writing_batch)
        prompts = data.rows(ids, count, recipe.prompt, seed=seed, step=index).to(target.embedding.device)
        temperature = recipe.temperatures[index % len(recipe.temperatures)]
        pool.append(target.write(prompts, recipe.new, temperature, seed + index).to("cpu", torch.int32))
        say(f"written {sum(map(len, pool))} of {recipe.sequences} continuations")
    return torch.cat(pool)


def draft_logits(
    target: Target, drafter: Drafter, ids: Tensor, features: Tensor, anchors: Tensor, block: int
) -> Tensor:
    """Return [B, A, block - 1, V]: the drafter's logits after each of ``anchors`` [B, A] in ``ids`` [B, S]."""
    batch, count = anchors.shape
    positions = anchors[..., None] + torch.arange(block, device=ids.device)
    slots = torch.full_like(positions, drafter.shape.mask_token_id)
    slots[..., 0] = ids.gather(1, anchors)
    embedded = functional.embedding(slots.flatten(1), target.embedding).float()
    seen = torch.arange(ids.shape[1], device=ids.device).expand(batch, -1)
    hidden = drafter(embedded, positions.flatten(1), features.float(), seen, block_mask(anchors, block, ids.shape[1]))
    return functional.linear(hidden.unflatten(1, (count, block))[:, :, 1:], target.head.to(hidden.dtype))


def train(
    target: Target, pool: Tensor, shape: DrafterShape, recipe: DraftRecipe, budget: loop.Budget, seed: int,
    state_file: Path, say: loop.Say, *, resume: bool = False, compiled: bool = False,
) -> tuple[Drafter, loop.Run]:  # fmt: skip
    """Return a drafter trained on ``pool``."""
    device = target.embedding.device
    torch.manual_seed(seed)
    drafter = Drafter(shape).to(device)
    if compiled:
        device_use.forgive_compiler()
    run_drafter: Any = torch.compile(drafter, dynamic=False) if compiled else drafter
    kept = pool.to(device)
    offset = torch.arange(1, recipe.block, device=device)

    def losses(step: int, _progress: float) -> dict[str, Tensor]:
        dice = data.dice(seed, step, "draft")
        block = recipe.block // (1 + step % 2)
        chosen = torch.randint(0, len(pool), (recipe.batch,), generator=dice)
        ids = kept[chosen.to(device)].long()
        anchors = torch.randint(
            recipe.prompt, ids.shape[1] - recipe.block, (recipe.batch, recipe.anchors), generator=dice
        )
        anchors = anchors.to(device)
        with device_use.autocast(device):
            features = target.features(ids, shape.target_layer_ids)
            logits = draft_logits(target, run_drafter, ids, features, anchors, block)
        after = offset[: block - 1]
        wanted = ids.gather(1, (anchors[..., None] + after).flatten(1)).flatten()
        weights = torch.exp(-(after - 1) / recipe.gamma).expand((*anchors.shape, -1)).flatten()
        entropy = functional.cross_entropy(logits.flatten(0, 2).float(), wanted, reduction="none")
        return {"loss": (weights * entropy).sum() / weights.sum()}

    run = loop.Loop(
        model=drafter,
        optimizers=loop.optimizers(drafter, recipe.rate, muon=False, weight_decay=recipe.weight_decay),
        rate=loop.Rate(peak=recipe.rate, warm_up=recipe.warm_up, decay_from=None),
        budget=budget,
        losses=losses,
        tokens_per_step=lambda _progress: recipe.batch * recipe.anchors * recipe.block,
        state_file=state_file,
        say=say,
        clip=recipe.clip,
    ).train(resume=resume)
    return drafter.eval(), run


@torch.no_grad()
def acceptance(
    target: Target, drafter: Drafter, ids: Tensor, starts: Tensor, *, new: int, drafts: int
) -> dict[str, Any]:
    """Return what speculation with ``drafts`` tokens would have accepted while the target wrote ``ids``.

    A block is drafted at every written position; then the blocks are walked as an engine would: each step keeps the
    drafts that agree with the text, and the target's next token. For greedy text that is what an engine does; for
    sampled text, drafts are greedy and kept when they are what the target sampled, which happens as often as in
    rejection sampling.

    Args:
        ids: [B, S] int64, prompts and what the target wrote after them.
        starts: [B], where the written text begins; ``new`` tokens of it count.
    """
    features = target.features(ids, drafter.shape.target_layer_ids)
    after = torch.arange(1, drafts + 1, device=ids.device)
    kept = []
    at_once = max(1, min(64, int(LOGITS / (len(ids) * drafts * drafter.shape.vocabulary))))
    for begin in range(0, new - drafts - 1, at_once):
        places = torch.arange(begin, min(begin + at_once, new - drafts - 1), device=ids.device)
        anchors = starts[:, None] + places
        logits = draft_logits(target, drafter, ids, features, anchors, drafts + 1)
        wanted = ids.gather(1, (anchors[..., None] + after).flatten(1)).view(*anchors.shape, drafts)
        kept.append((logits.argmax(dim=-1) == wanted).long().cumprod(dim=-1).sum(dim=-1))
    steps, emitted = 0, 0
    reached = torch.zeros(drafts, dtype=torch.long)
    for row in torch.cat(kept, dim=1).cpu().tolist():
        at = 0
        while at < len(row):
            steps += 1
            emitted += row[at] + 1
            reached[: row[at]] += 1
            at += row[at] + 1
    return {
        "tau": round(emitted / max(steps, 1), 4),
        "steps": steps,
        "at_least": [round(share, 4) for share in (reached / max(steps, 1)).tolist()],
    }


def acceptance_table(
    target: Target, drafter: Drafter, prompts: dict[str, list[list[int]]], *, count: int, new: int, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Return ``acceptance`` for every kind of prompt, two temperatures, and half and whole blocks."""
    table: dict[str, dict[str, Any]] = {kind: {} for kind in prompts}
    block = drafter.shape.block_size
    for kind, rows in prompts.items():
        starts = torch.tensor([len(row) for row in rows[:count]], device=target.embedding.device)
        for temperature in (0.0, 0.7):
            ids = target.write_rows(rows[:count], new, temperature, seed)
            for drafts in (block // 2 - 1, block - 1):
                found = acceptance(target, drafter, ids, starts, new=new, drafts=drafts)
                table[kind][f"K={drafts}, T={temperature:g}"] = found
    return table


def describe(shape: DrafterShape, recipe: DraftRecipe) -> dict[str, Any]:
    """Return recipe and cost, JSON-ready."""
    return {
        "recipe": asdict(recipe),
        "target_layer_ids": list(shape.target_layer_ids),
        "products_per_slot": products_per_slot(shape),
        "products_per_context_token": products_per_context_token(shape),
    }
