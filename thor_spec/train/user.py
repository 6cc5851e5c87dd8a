"""``thor-spec train drafter``: from a target and some text to a DFlash drafter."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thor_spec.errors import ConfigError
from thor_spec.nano import drafter as stored
from thor_spec.train import device, drafting, loop, targets

DEFAULT_MINUTES = 60.0
RESERVE = 0.1  # of the time, for the evaluation
HELD_OUT = 0.02  # of the text
LOGITS = 3e8  # most numbers of one step's logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for; None takes a default that fits the target."""

    target: Path
    text: Path
    out: Path
    minutes: float | None = None
    steps: int | None = None
    layers: int | None = None
    block: int = 16
    sequences: int | None = None
    new_tokens: int | None = None
    mask_token_id: int | None = None
    seed: int = 1
    device: str | None = None
    resume: bool = False


def train_drafter(request: Request, say: loop.Say) -> dict[str, Any]:
    """Train, write ``request.out`` and return the metrics. Raises: ConfigError."""
    started = time.monotonic()
    where = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device.prepare(where)
    tokenizer = _tokenizer(request.target)
    target = targets.open_target(request.target, where)
    recipe = recipe_for(target, request)
    ids = _ids(request.text, tokenizer)
    held_out = max(recipe.prompt + 1, int(HELD_OUT * len(ids)))
    if len(ids) < 4 * held_out:
        raise ConfigError(
            f"{request.text} gives {len(ids)} tokens, too few for prompts of {recipe.prompt}. Pass more text: some "
            "hundred kilobytes of what the target will be asked."
        )
    mask = mask_id(request.mask_token_id, tokenizer, target.embedding.shape[0])
    request.out.mkdir(parents=True, exist_ok=True)
    seconds = None if request.steps else 60 * (request.minutes or DEFAULT_MINUTES) * (1 - RESERVE)
    shape = drafting.shape_for(target, recipe, mask_token_id=mask, max_length=_max_length(request.target))
    pool = _pool(
        request, target, ids[:-held_out], recipe, started + seconds * recipe.writing_share if seconds else None, say
    )
    left = loop.Budget(steps=request.steps, seconds=max(5.0, started + seconds - time.monotonic()) if seconds else None)
    module, run = drafting.train(
        target, pool, shape, recipe, left, request.seed, request.out / "training.state", say,
        resume=request.resume, compiled=where.startswith("cuda"),
    )  # fmt: skip
    module.save(request.out)
    (request.out / "model.safetensors").chmod(0o644)  # its writer grants nothing to others
    final = stored.load(request.out).to(where)
    windows = ids[-held_out:].unfold(0, recipe.prompt, recipe.prompt)[:16].tolist()
    with device.autocast(torch.device(where)):
        table = drafting.acceptance_table(target, final, {"text": windows}, count=16, new=min(128, recipe.new))["text"]
    metrics = {
        "schema": 1,
        "target": request.target.name,
        "seed": request.seed,
        "steps": run.step,
        "sequences": len(pool),
        "tau": {setting: found["tau"] for setting, found in table.items()},
        "acceptance": table,
        **drafting.describe(shape, recipe),
        "history": run.history,
    }
    loop.write_metrics(request.out / "metrics.json", metrics)
    return metrics


def recipe_for(target: targets.Target, request: Request) -> drafting.DraftRecipe:
    """Return a recipe in proportion to the target: heads as wide as usual at its size, steps that fit memory."""
    head_dim = 128 if target.hidden >= 1024 else 64
    heads = max(4, target.hidden // head_dim)
    on_gpu = target.embedding.is_cuda
    slots = max(64, int(LOGITS / target.embedding.shape[0]) // request.block) if on_gpu else 64
    anchors = min(48, max(4, slots // 16))
    recipe = drafting.DraftRecipe(
        block=request.block,
        gamma=7.0 * request.block / 16,
        layers=request.layers or (2 if target.hidden < 512 else 5),
        heads=heads,
        kv_heads=max(1, heads // 4),
        head_dim=head_dim,
        intermediate=128 if target.hidden < 512 else 3 * target.hidden,
        taps=min(5, target.layers) if target.hidden >= 512 else min(4, target.layers),
        rate=2e-3 if target.hidden < 512 else 6e-4,
        anchors=anchors,
        batch=max(1, min(64, slots // anchors)),
        writing_batch=(2048 if target.hidden < 512 else 64) if on_gpu else 8,
        sequences=request.sequences or (49_152 if target.hidden < 512 else 16_384),
    )
    return replace(recipe, new=request.new_tokens) if request.new_tokens else recipe


def mask_id(given: int | None, tokenizer: Any, vocabulary: int) -> int:
    """Return the id that stands for a token to be drafted: given, the tokenizer's mask, or one that means nothing.

    Raises: ConfigError, when none is free.
    """
    if given is not None:
        if not 0 <= given < vocabulary:
            raise ConfigError(f"--mask-token-id {given} lies outside the vocabulary of {vocabulary}.")
        return given
    if (own := getattr(tokenizer, "mask_token_id", None)) is not None:
        return int(own)
    if len(tokenizer) < vocabulary:
        return vocabulary - 1  # padding of the vocabulary
    raise ConfigError(
        f"All {vocabulary} ids of the target's vocabulary have a meaning. Name one that never occurs in text, such as "
        "a reserved token's, with --mask-token-id."
    )


def _pool(
    request: Request,
    target: targets.Target,
    ids: Tensor,
    recipe: drafting.DraftRecipe,
    until: float | None,
    say: loop.Say,
) -> Tensor:
    kept = request.out / "training.pool"
    if request.resume and kept.is_file():
        pool: Tensor = torch.load(kept, weights_only=True)
        return pool
    with device.autocast(target.embedding.device):
        pool = drafting.write_pool(target, ids, recipe, request.seed, until, say)
    torch.save(pool, kept)
    return pool


def _tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def _max_length(directory: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(directory).get_text_config().max_position_embeddings)


def _ids(text: Path, tokenizer: Any) -> Tensor:
    """Return the ids of every file in ``text``, in the order of their names, ends of text between them."""
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    ids = [
        index
        for page in _pages(text)
        for index in (*tokenizer(page, add_special_tokens=False, verbose=False)["input_ids"], *end)
    ]
    return torch.tensor(ids)


def _pages(text: Path) -> Iterator[str]:
    files = sorted(path for path in text.rglob("*") if path.is_file()) if text.is_dir() else [text]
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 text ({error.reason}). Pass text files only.") from error
