"""Training and evaluation of nano-hybrid: next-token prediction on the packed corpus."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from thor_spec.train import data, device, loop
from thor_spec.train.data import Corpus
from thor_spec.train.hybrid import Hybrid
from thor_spec.train.shapes import HybridShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageRecipe:
    """The numbers of a training."""

    phases: tuple[tuple[float, int], ...] = ((0.88, 2048), (1.0, 8192))
    """Up to which share of the budget rows have which length; the last makes the model use its whole context."""
    tokens: int = 65_536
    """Per step, whatever the length of a row."""
    rate: float = 5e-3
    weight_decay: float = 0.1
    muon: bool = True
    balance: float = 0.01
    """Weight of the experts' balance loss."""
    clip: float = 1.0

    def length(self, progress: float) -> int:
        """Return the length of rows at ``progress``."""
        return next(length for share, length in self.phases if progress < share or share >= 1)


SMOKE_SHAPE = {  # heads as wide as engines expect them, so that it can be served
    "hidden": 64,
    "layers": 4,
    "key_heads": 1,
    "value_heads": 2,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 64,
    "experts": 4,
    "experts_per_token": 2,
    "expert_intermediate": 16,
    "shared_intermediate": 32,
}
SMOKE = LanguageRecipe(phases=((0.8, 128), (1.0, 256)), tokens=1024)


def train(
    corpus: Corpus, shape: HybridShape, recipe: LanguageRecipe, budget: loop.Budget, where: torch.device, seed: int,
    state_file: Path, say: loop.Say, *, resume: bool = False, compiled: bool = False, stop_after: int | None = None,
) -> tuple[Hybrid, loop.Run]:  # fmt: skip
    """Return a trained model."""
    torch.manual_seed(seed)
    model: Hybrid = Hybrid(shape).to(where)
    ids = corpus.segment("train").to(where)
    if compiled:
        device.compile_layers(model.layers, say)

    def losses(step: int, progress: float) -> dict[str, Tensor]:
        length = recipe.length(progress)
        if compiled and length != recipe.phases[0][1]:  # compiling anew would take much of what time is left
            torch.compiler.set_stance("force_eager")
        rows = data.rows(ids, max(1, recipe.tokens // length), length + 1, seed=seed, step=step)
        with device.autocast(where):
            hidden, _, balance = model(rows[:, :-1])
            logits = model.lm_head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        return {"loss": loss, "weighted balance": recipe.balance * balance}

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
    ).train(resume=resume, stop_after=stop_after)
    if compiled:
        torch.compiler.set_stance("default")
    return model.eval(), run


@torch.no_grad()
def bits_per_byte(model: Hybrid, corpus: Corpus, *, length: int = 2048, most: int = 400_000) -> dict[str, float]:
    """Return bits per byte on the held-out text of each kind: windows of ``length`` tokens, each from a fresh start.

    Marks write no bytes, and their loss counts; so does that of the first tokens of a window, seen without context.
    """
    where = model.lm_head.weight.device
    sizes = corpus.token_bytes().to(where)
    result = {}
    for kind in corpus.kinds:
        nats = written = 0.0
        for rows in _windows(corpus.segment(f"held-out {kind}")[:most].to(where).long(), length):
            entropy = _entropy(model, rows)
            nats += float(entropy.sum())
            written += float(sizes[rows[:, 1:]].sum())
        result[kind] = round(nats / math.log(2) / written, 4) if written else math.nan
    return result


@torch.no_grad()
def nats_by_position(model: Hybrid, corpus: Corpus, length: int = 8192) -> dict[str, float]:
    """Return nats per token in the first and last eighth of windows of ``length`` held-out tokens of code."""
    where = model.lm_head.weight.device
    ids = corpus.segment("held-out code").to(where).long()
    found = [_entropy(model, rows) for rows in _windows(ids[: 16 * length], length) if rows.shape[1] == length + 1]
    if not found:
        return {}
    entropy = torch.cat(found)
    eighth = length // 8
    return {
        f"0..{eighth}": round(float(entropy[:, :eighth].mean()), 4),
        f"{length - eighth}..{length}": round(float(entropy[:, -eighth:].mean()), 4),
    }


def _windows(ids: Tensor, length: int) -> list[Tensor]:
    """Return the text cut into [n, length + 1] pieces that share their borders, and what remains as [1, rest]."""
    whole = (len(ids) - 1) // length
    rows = [ids[: whole * length + 1].unfold(0, length + 1, length)] if whole else []
    rest = ids[whole * length :]
    batches = [piece for row in rows for piece in row.split(max(1, 16_384 // length))]
    return batches + ([rest[None]] if len(rest) > 1 else [])


def _entropy(model: Hybrid, rows: Tensor) -> Tensor:
    logits = model.logits(rows[:, :-1]).flatten(0, 1).float()
    return functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="none").view(len(rows), -1)


def describe(shape: HybridShape, recipe: LanguageRecipe) -> dict[str, Any]:
    """Return shape, recipe and cost, JSON-ready."""
    return {"shape": asdict(shape), "recipe": asdict(recipe), "products_per_token": shape.products_per_token()}
