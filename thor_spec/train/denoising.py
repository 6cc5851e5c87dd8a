"""Training and evaluation of nano-llada: masked denoising in blocks, and a stream that corrects wrong tokens."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thor_spec.train import data, device, loop, noise
from thor_spec.train.data import Corpus
from thor_spec.train.diffusion import Diffusion
from thor_spec.train.noise import Damaged, Noise
from thor_spec.train.shapes import DiffusionShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoisingRecipe:
    """The numbers of a training."""

    phases: tuple[tuple[float, int], ...] = ((0.88, 512), (1.0, 2048))
    """Up to which share of the budget rows have which length."""
    tokens: int = 65_536
    """Per step, counted once; each is seen in a damaged and in a clean copy."""
    rate: float = 5e-3
    weight_decay: float = 0.1
    muon: bool = True
    noise: Noise = field(default_factory=Noise)
    editing: float = 0.5
    """Weight of the loss on shown tokens."""
    own_guesses_every: int = 4
    """In one step of so many, part of the masks is filled with the model's own guesses first."""
    bias_rate: float = 1e-3
    clip: float = 1.0

    def length(self, progress: float) -> int:
        """Return the length of rows at ``progress``."""
        return next(length for share, length in self.phases if progress < share or share >= 1)


SMOKE_SHAPE = {"hidden": 64, "layers": 3, "intermediate": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "experts": 8,
               "experts_per_token": 2, "expert_intermediate": 16, "groups": 4, "groups_per_token": 2}  # fmt: skip
SMOKE = DenoisingRecipe(phases=((0.8, 64), (1.0, 128)), tokens=512)


def train(
    corpus: Corpus, shape: DiffusionShape, recipe: DenoisingRecipe, budget: loop.Budget, where: torch.device, seed: int,
    state_file: Path, say: loop.Say, *, resume: bool = False, compiled: bool = False, stop_after: int | None = None,
) -> tuple[Diffusion, loop.Run]:  # fmt: skip
    """Return a trained model."""
    torch.manual_seed(seed)
    model: Diffusion = Diffusion(shape).to(where)
    model.train()
    ids, mask_id = corpus.segment("train").to(where), corpus.marks().mask
    masks = {length: noise.two_copy_mask(length, shape.block, where) for _, length in recipe.phases}
    positions = {length: torch.arange(length, device=where).repeat(2) for length in masks}
    if compiled:
        device.compile_layers(model.layers, say)

    def predict(damaged: Damaged, clean: Tensor) -> Tensor:
        with device.autocast(where):
            both, length = torch.cat([damaged.ids, clean], dim=1), clean.shape[1]
            logits: Tensor = model(both, positions[length], masks[length], count=length)
        return logits

    def losses(step: int, progress: float) -> dict[str, Tensor]:
        length = recipe.length(progress)
        rows = max(1, recipe.tokens // length)
        if compiled and length != recipe.phases[0][1]:
            torch.compiler.set_stance("force_eager")
        clean = data.rows(ids, rows, length, seed=seed, step=step)
        dice = data.dice(seed, step, "noise")
        damaged = noise.damage(clean, shape.block, mask_id, recipe.noise, dice)
        if step % recipe.own_guesses_every == recipe.own_guesses_every - 1:
            with torch.no_grad(), device.as_it_is(compiled):
                guesses = predict(damaged, clean).argmax(dim=-1)
            share = torch.rand(rows, 1, generator=dice).to(where)
            damaged = noise.refill(damaged, guesses, share, dice)
        masked, shown = noise.denoising_losses(predict(damaged, clean), clean, damaged)
        return {"loss": masked, "weighted editing": recipe.editing * shown}

    run = loop.Loop(
        model=model,
        optimizers=loop.optimizers(model, recipe.rate, muon=recipe.muon, weight_decay=recipe.weight_decay),
        rate=loop.Rate(peak=recipe.rate),
        budget=budget,
        losses=losses,
        tokens_per_step=lambda _progress: recipe.tokens,
        state_file=state_file,
        say=say,
        clip=recipe.clip,
        after_step=lambda: model.rebalance(recipe.bias_rate),
    ).train(resume=resume, stop_after=stop_after)
    if compiled:
        torch.compiler.set_stance("default")
    return model.eval(), run


@torch.no_grad()
def evaluate(
    model: Diffusion, corpus: Corpus, *, length: int = 512, most: int = 131_072, seed: int = 0
) -> dict[str, Any]:
    """Return, by kind of held-out text: a bound on bits per byte, and how often the likeliest token is right.

    The bound averages the weighted loss over mask rates on a fixed grid. ``right when masked`` is by mask rate;
    ``errors corrected`` and ``tokens kept`` are of unmasked blocks with one wrong token in ten.
    """
    where = model.lm_head.weight.device
    sizes, mask_id, block = corpus.token_bytes().to(where), corpus.marks().mask, model.shape.block
    seen_by = noise.two_copy_mask(length, block, where)
    positions = torch.arange(length, device=where).repeat(2)
    grid = [(i + 0.5) / 8 for i in range(8)]
    result = {}
    for kind in corpus.kinds:
        ids = corpus.segment(f"held-out {kind}")[:most].to(where).long()
        rows = ids[: len(ids) // length * length].view(-1, length)
        if not len(rows):
            continue
        bound, right = [], {}
        for number, rate in enumerate(grid):
            damage = Noise(lowest=rate, highest=rate, edited_rows=0.0)
            nats, hits, count = 0.0, 0, 0
            for part in rows.split(32):
                damaged = noise.damage(part, block, mask_id, damage, data.dice(seed, number, kind))
                logits = model(torch.cat([damaged.ids, part], dim=1), positions, seen_by, count=length)
                nats += float(noise.denoising_losses(logits, part, damaged)[0]) * part.numel()
                hits += int((damaged.masked & (logits.argmax(dim=-1) == part)).sum())
                count += int(damaged.masked.sum())
            bound.append(nats)
            right[f"{rate:.2f}"] = round(hits / max(count, 1), 4)
        bits = sum(bound) / len(bound) / math.log(2) / float(sizes[rows].sum())
        kept, corrected = _editing(model, rows, positions, seen_by, mask_id, seed)
        result[kind] = {
            "bits per byte, at most": round(bits, 4),
            "right when masked": right,
            "errors corrected": corrected,
            "tokens kept": kept,
        }
    return result


def _editing(
    model: Diffusion, rows: Tensor, positions: Tensor, seen_by: Tensor, mask_id: int, seed: int
) -> tuple[float, float]:
    """Return the shares of right tokens left alone and of wrong tokens put right, with nothing masked."""
    none_masked = Noise(lowest=0.0, highest=0.0, edited_rows=1.0, wrong=0.2)
    kept = corrected = right = wrong = 0
    for part in rows.split(32):
        damaged = noise.damage(part, model.shape.block, mask_id, none_masked, data.dice(seed, 0, "edit"))
        logits = model(torch.cat([damaged.ids, part], dim=1), positions, seen_by, count=part.shape[1])
        best, is_wrong = logits.argmax(dim=-1), damaged.ids != part
        kept += int((~is_wrong & (best == part)).sum())
        corrected += int((is_wrong & (best == part)).sum())
        right += int((~is_wrong).sum())
        wrong += int(is_wrong.sum())
    return round(kept / max(right, 1), 4), round(corrected / max(wrong, 1), 4)


def describe(shape: DiffusionShape, recipe: DenoisingRecipe) -> dict[str, Any]:
    """Return shape and recipe, JSON-ready."""
    return {"shape": asdict(shape), "recipe": asdict(recipe)}
