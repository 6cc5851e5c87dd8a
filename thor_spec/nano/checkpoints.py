"""Tiny checkpoints by name, made the first time they are asked for and cached after that.

A checkpoint lies in ``<cache>/nano/<recipe>/<name>``, where ``recipe`` is a hash over the sources of this package: a
change to any of them makes new checkpoints beside the old. Every directory appears at once and complete.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, resources, util
from pathlib import Path
from typing import Any

from thor_spec import env
from thor_spec.errors import ConfigError, PlatformError
from thor_spec.nano.recipes import DRAFTERS, TARGETS

PAIRS = {recipe.target: name for name, recipe in DRAFTERS.items()}  # target to drafter
NAMES = (*TARGETS, *DRAFTERS)
MANIFEST = "manifest.json"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")


@dataclass(frozen=True, slots=True)
class Made:
    """What a maker reports for the manifest: its seed, and the loss at both ends of the training."""

    seed: int
    first_loss: float
    last_loss: float


def ensure(name: str, root: Path | None = None) -> Path:
    """Return the directory of checkpoint ``name``, making it first (and its target, for a drafter) if it is missing.

    The first time takes up to half a minute. Callers in several processes wait for one another.

    Raises: ConfigError, for an unknown name; PlatformError, where torch or transformers is missing.
    """
    if name not in NAMES:
        raise ConfigError(f"there is no tiny checkpoint {name!r}; choose one of {', '.join(NAMES)}.")
    home = (root if root is not None else env.cache_dir() / "nano") / recipe_hash()
    directory = home / name
    if (directory / MANIFEST).exists():
        return directory
    if missing := [package for package in PACKAGES if util.find_spec(package) is None]:
        raise PlatformError(
            f"making {name} needs {', '.join(missing)}, which this Python does not have. "
            "Install the engine: pip install 'thor-spec[cpu]' or 'thor-spec[cuda]'."
        )
    target = ensure(DRAFTERS[name].target, root) if name in DRAFTERS else None
    home.mkdir(parents=True, exist_ok=True)
    with _lock(home / f".{name}.lock"):
        if not (directory / MANIFEST).exists():
            _make_at_once(name, target, directory)
    return directory


def is_made(name: str) -> bool:
    """Return whether ``ensure`` would find the checkpoint ready."""
    return (env.cache_dir() / "nano" / recipe_hash() / name / MANIFEST).exists()


@functools.cache
def recipe_hash() -> str:
    """Return twelve hex digits over the sources of this package, in the order of their names."""
    digest = hashlib.sha256()
    for entry in sorted(resources.files(__package__).iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith((".py", ".jinja")):
            content = entry.read_bytes()
            digest.update(f"{entry.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel drops it with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_at_once(name: str, target: Path | None, directory: Path) -> None:
    """Make the checkpoint beside ``directory`` and rename it into place."""
    for leftover in directory.parent.glob(f".{name}.*.partial"):  # the lock is ours, so its maker is gone
        shutil.rmtree(leftover)
    partial = directory.parent / f".{name}.{uuid.uuid4().hex}.partial"
    partial.mkdir()
    with _quiet():
        made = _make_target(name, partial) if target is None else _make_drafter(name, target, partial)
    (partial / "model.safetensors").chmod(0o644)  # its writer grants nothing to others
    manifest: dict[str, Any] = {
        "schema": 1,
        "name": name,
        "recipe": recipe_hash(),
        **asdict(made),
        "packages": {package: metadata.version(package) for package in PACKAGES},
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(partial.iterdir())},
    }
    if target is not None:
        manifest["target"] = {"name": target.name, "files": json.loads((target / MANIFEST).read_text())["files"]}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    partial.rename(directory)


def _make_target(name: str, directory: Path) -> Made:
    """Write a target: closed-form start, short training, bf16 weights."""
    import torch

    from thor_spec.nano import fit, target

    recipe = TARGETS[name]
    target.save(directory, recipe)
    model = target.load(directory)
    losses = fit.fit_target(model, recipe)
    model.to(torch.bfloat16).save_pretrained(directory)
    target.save_settings(directory, recipe)  # transformers wrote its own version of some of them
    return Made(recipe.seed, losses[0], losses[-1])


def _make_drafter(name: str, target_directory: Path, directory: Path) -> Made:
    """Write a drafter, fitted to the checkpoint in ``target_directory``."""
    from thor_spec.nano import drafter, fit, target, tokenizer

    recipe, known = DRAFTERS[name], TARGETS[DRAFTERS[name].target]
    shape = drafter.DrafterShape(
        vocabulary=tokenizer.VOCABULARY,
        hidden=known.hidden,
        target_layers=known.layers,
        target_layer_ids=recipe.target_layer_ids,
        mask_token_id=tokenizer.MARK_IDS[tokenizer.MASK],
        heads=recipe.heads,
        kv_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_length=known.max_length,
        rope_theta=known.rope_theta,
        epsilon=known.epsilon,
    )
    with fit.reproducible(recipe.plan.seed):
        module = drafter.Drafter(shape)
    losses = fit.fit_drafter(target.load(target_directory), module, recipe.plan)
    module.save(directory)
    return Made(recipe.plan.seed, losses[0], losses[-1])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars, and its advice on faster kernels that would serve nothing here."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
