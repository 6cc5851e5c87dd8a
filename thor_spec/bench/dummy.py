"""Checkpoints with the dimensions of a real model and no weights, for questions that only the hardware answers."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

from thor_spec import env
from thor_spec.errors import ConfigError

_DIMS = "dims"
_MAX_LENGTH_FIELD = "max_position_embeddings"


def names() -> list[str]:
    """Return the models whose dimensions are shipped."""
    folder = resources.files(__package__).joinpath(_DIMS)
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def make(name: str, root: Path | None = None) -> tuple[Path, Path]:
    """Return folders of target and drafter, made if they are missing; vLLM fills them with ``--load-format dummy``.

    Raises: ConfigError, for an unknown name.
    """
    if name not in names():
        raise ConfigError(f"There are no dimensions of {name!r}. There are: {', '.join(names())}.")
    shipped = resources.files(__package__).joinpath(_DIMS, f"{name}.json")
    dims: dict[str, Any] = json.loads(shipped.read_text(encoding="utf-8"))
    home = (root or env.cache_dir() / "dummy") / name
    return _write(home / "target", dims["target"]), _write(home / "drafter", dims["drafter"])


def _write(folder: Path, config: dict[str, Any]) -> Path:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    # Never read; a checkpoint without any weights is refused as incomplete.
    save_file({"none": torch.zeros(1)}, str(folder / "model.safetensors"))
    _tokenizer(folder, config["vocab_size"], config[_MAX_LENGTH_FIELD])
    return folder


def _tokenizer(folder: Path, vocabulary: int, max_length: int) -> None:
    """Write the nano models' byte-level tokenizer, padded so that every id that a dummy may draw has a text."""
    from thor_spec.nano import tokenizer

    tokenizer.save(folder, max_length=max_length)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    used = {entry["id"] for entry in content["added_tokens"]} | set(content["model"]["vocab"].values())
    content["model"]["vocab"] |= {f"\u00ab{i}\u00bb": i for i in range(vocabulary) if i not in used}
    path.write_text(json.dumps(content), encoding="utf-8")
