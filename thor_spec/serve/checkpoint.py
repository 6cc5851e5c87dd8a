"""A checkpoint folder, judged by its files before anything heavy starts."""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thor_spec import json_text
from thor_spec.capacity.source import closed
from thor_spec.dflash.drafter import TargetShape
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import compat

_HEADER_LIMIT_BYTES = 100 << 20  # the safetensors format's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A local checkpoint whose configuration was read and whose weight files are whole."""

    name: str
    path: Path
    config: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """Return the first architecture that the configuration names."""
        return str(self.config["architectures"][0])

    @property
    def text_config(self) -> Mapping[str, Any]:
        """Return the language model's part of the configuration: nested in multimodal models."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, Mapping) else self.config

    @property
    def context(self) -> int:
        """Return the model's longest context, in tokens."""
        return int(self._field("max_position_embeddings"))

    @property
    def is_hybrid(self) -> bool:
        """Return whether the model has Gated-DeltaNet layers, that is, recurrent state."""
        layers = self.text_config.get("layer_types") or ()
        return "linear_attention" in layers or "linear_num_value_heads" in self.text_config

    @property
    def is_diffusion(self) -> bool:
        """Return whether the model denoises blocks."""
        return self.architecture == compat.LLADA2

    @property
    def has_chat_template(self) -> bool:
        """Return whether the tokenizer brings a chat template, in a file of its own or in its configuration."""
        if (self.path / "chat_template.jinja").is_file():
            return True
        try:
            return "chat_template" in json_text.loads((self.path / "tokenizer_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False

    def target_shape(self) -> TargetShape:
        """Return the facts that a drafter is bound to."""
        return TargetShape(
            name=self.name,
            vocab_size=int(self._field("vocab_size")),
            hidden_size=int(self._field("hidden_size")),
            num_layers=int(self._field("num_hidden_layers")),
        )

    def _field(self, name: str) -> Any:
        if name not in self.text_config:
            raise ConfigError(f"{self.path}/config.json has no {name}. Take the checkpoint from its publisher again.")
        return self.text_config[name]


def open_checkpoint(name: str, path: Path) -> Checkpoint:
    """Read and check the checkpoint in ``path``; weights are checked by their headers, not loaded.

    Raises: ConfigError: no folder, no or malformed config.json, no architectures, missing or truncated weights.
    """
    try:
        if not path.is_dir():
            raise ConfigError(f"No checkpoint at {path}. Pass the folder that holds its config.json.")
        os.listdir(path)  # else a folder that may only be entered would seem to hold no weights
    except PermissionError as error:
        raise closed(path) from error
    config_file = path / "config.json"
    try:
        config = json_text.loads(config_file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} has no config.json, so it is not a checkpoint. Pass the folder that has one."
        ) from error
    except PermissionError as error:
        raise closed(config_file) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config_file} cannot be read as JSON ({error}). Download the checkpoint again.") from error
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(
            f"{config_file} names no architectures, so no engine knows how to build it. "
            "Take the config.json of the published checkpoint."
        )
    _require_whole_weights(path)
    return Checkpoint(name=name, path=path, config=config)


def _require_whole_weights(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            expected = sorted(set(json_text.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except PermissionError as error:
            raise closed(index) from error
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index} is malformed ({error}). Download the checkpoint again.") from error
        files = [path / name for name in expected]
    else:
        files = sorted(path.glob("*.safetensors"))
        if not files and not any(path.glob("*.bin")):
            raise ConfigError(f"{path} holds no weights (*.safetensors). Download the checkpoint again.")
    for file in files:
        if problem := _truncation(file):
            raise ConfigError(f"{file} {problem}. Download the checkpoint again.")


def _truncation(file: Path) -> str | None:
    """Return what is wrong with the size of a safetensors file, by its header (8 bytes of length, then JSON)."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                return f"is truncated: {size} bytes"
            (length,) = struct.unpack("<Q", prefix)
            if length > min(_HEADER_LIMIT_BYTES, size):
                return "is truncated or not a safetensors file: its header reaches past its end"
            header = json_text.loads(stream.read(length))
    except FileNotFoundError:
        return "is missing"
    except PermissionError as error:
        raise closed(file) from error
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    expected = 8 + length + max(ends, default=0)
    return f"is truncated: {size} bytes of {expected}" if size < expected else None
