"""``thor-spec train drafter``: from a target and some text to a DFlash drafter."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thor_spec.errors import ConfigError, PlatformError
from thor_spec.nano import drafter as stored
from thor_spec.train import device, drafting, kept, loop, targets
from thor_spec.train.request import Request

DEFAULT_MINUTES = 60.0
RESERVE = 0.1  # of the time, for the evaluation
HELD_OUT = 0.02  # of the text


def train_drafter(request: Request, say: loop.Say) -> dict[str, Any]:
    """Train, write ``request.out`` and return the metrics. Raises: ConfigError, PlatformError."""
    started = time.monotonic()
    where = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if where.startswith("cuda") and not torch.cuda.is_available():
        raise PlatformError(f"--device {where} needs a GPU that PyTorch can use, and there is none. Take --device cpu.")
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
    minutes = DEFAULT_MINUTES if request.minutes is None else request.minutes
    seconds = None if request.steps is not None else 60 * minutes * (1 - RESERVE)
    shape = drafting.shape_for(target, recipe, mask_token_id=mask, max_length=_max_length(request.target))
    pool = _pool(
        request,
        target,
        ids[:-held_out],
        recipe,
        started + seconds * recipe.writing_share if seconds is not None else None,
        say,
    )
    left = loop.Budget(
        steps=request.steps, seconds=None if seconds is None else max(5.0, started + seconds - time.monotonic())
    )
    module, run = drafting.train(
        target, pool, shape, recipe, left, request.seed, request.out / "training.state", say,
        resume=request.resume, compiled=where.startswith("cuda"),
    )  # fmt: skip
    module.save(request.out)
    (request.out / "model.safetensors").chmod(0o644)  # its writer grants nothing to others
    final = stored.load(request.out).to(where)
    windows = ids[-held_out:].unfold(0, recipe.prompt, recipe.prompt)[:16].tolist()
    with device.autocast(torch.device(where)):
        new = min(max(128, 2 * recipe.block), recipe.new)  # room for whole blocks, whatever their size
        table = drafting.acceptance_table(target, final, {"text": windows}, count=16, new=new)["text"]
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
    slots = max(64, int(drafting.LOGITS / target.embedding.shape[0]) // request.block) if on_gpu else 64
    anchors = min(48, max(4, slots // 16))
    small = target.hidden < 512
    return drafting.DraftRecipe(
        block=request.block,
        gamma=7.0 * request.block / 16,
        layers=(2 if small else 5) if request.layers is None else request.layers,
        heads=heads,
        kv_heads=max(1, heads // 4),
        head_dim=head_dim,
        intermediate=128 if small else 3 * target.hidden,
        taps=min(5, target.layers) if target.hidden >= 512 else min(4, target.layers),
        rate=2e-3 if small else 6e-4,
        anchors=anchors,
        batch=max(1, min(64, slots // anchors)),
        writing_batch=(2048 if small else 64) if on_gpu else 8,
        sequences=(49_152 if small else 16_384) if request.sequences is None else request.sequences,
        new=request.new_tokens,
    )


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
    file = request.out / "training.pool"
    if request.resume and file.is_file():
        pool: Tensor = kept.read(file)
        return pool
    with device.autocast(target.embedding.device):
        pool = drafting.write_pool(target, ids, recipe, request.seed, until, say)
    kept.write(pool, file)
    return pool


def _tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{directory} holds no tokenizer that transformers can load ({str(error).splitlines()[0]}), so the text "
            "cannot be read as the target reads it. Take the tokenizer's files of the published checkpoint."
        ) from error


def _max_length(directory: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(directory, local_files_only=True).get_text_config().max_position_embeddings)


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
