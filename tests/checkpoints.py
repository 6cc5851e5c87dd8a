import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "max_position_embeddings": 8192,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 261, "target_layer_ids": [1, 2, 3]},
}

MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> MakeCheckpoint:
    """Return a maker of checkpoint folders: a name, a base configuration, and fields to change (None removes)."""

    def make(name: str, base: dict[str, Any], **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config = {key: value for key, value in {**base, **changes}.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        save_file({"weight": np.zeros((4, 4), np.float32)}, str(folder / "model.safetensors"))
        return folder

    return make


@pytest.fixture
def target(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("target", HYBRID)


@pytest.fixture
def drafter(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("drafter", DRAFTER)
