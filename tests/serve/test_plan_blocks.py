"""Starts of block-diffusion models."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import MakeCheckpoint
from thor_spec.config import resolve
from thor_spec.errors import ConfigError
from thor_spec.serve import command
from thor_spec.serve.plan import make_plan
from thor_spec.vllm_plugin.options import PluginOptions

from .conftest import value


@pytest.fixture
def blocks(make_checkpoint: MakeCheckpoint) -> Path:
    config = {"architectures": ["LLaDA2MoeModelLM"], "max_position_embeddings": 2048}
    return make_checkpoint("llada", config)


def test_a_block_diffusion_model_is_served_by_its_settings(blocks: Path, gpu: bool) -> None:
    plan = make_plan(resolve({"model": str(blocks), "mode": "speed", "edit_threshold": 0.4}))
    options = json.loads(value(plan, "--additional-config"))["thor_spec"]
    assert options["denoise"] == {"mode": "speed", "edit_threshold": 0.4}
    assert PluginOptions.parse({"thor_spec": options}).denoising == plan.denoising
    assert plan.denoising is not None
    assert plan.denoising.described == "threshold=0.5 edit_threshold=0.4"
    assert command.FRONT_DOOR in plan.argv
    assert "--speculative-config" not in plan.argv
    assert not plan.may_call_tools


@pytest.mark.parametrize(
    "flags",
    [{"draft": "x"}, {"draft_tokens": 3}, {"accept": "typical"}, {"accept_eps": 0.1}, {"acceptance_floor": 2.0}],
    ids=str,
)
def test_drafting_options_are_refused_to_a_block_diffusion_model(blocks: Path, flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(flags)).replace("_", "-")):
        make_plan(resolve({"model": str(blocks), **flags}))


@pytest.mark.parametrize("flags", [{"mode": "fast"}, {"threshold": 1.5}, {"max_denoise_steps": 0}], ids=str)
def test_settings_that_mean_nothing_are_refused(blocks: Path, flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(flags))):
        make_plan(resolve({"model": str(blocks), **flags}))


@pytest.mark.parametrize("flags", [{"mode": "speed"}, {"threshold": 0.5}, {"edit_threshold": 0.5}], ids=str)
def test_settings_of_blocks_are_refused_to_other_models(target: Path, flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not a block-diffusion model"):
        make_plan(resolve({"model": str(target), "draft": "none", **flags}))


def test_quantized_weights_of_a_block_diffusion_model_are_said_to_save_memory_only(
    make_checkpoint: MakeCheckpoint,
) -> None:
    config = {"architectures": ["LLaDA2MoeModelLM"], "max_position_embeddings": 2048}
    quantized = make_checkpoint("nvfp4", {**config, "quantization_config": {"quant_algo": "NVFP4"}})
    said: list[str] = []
    make_plan(resolve({"model": str(quantized)}), note=said.append)
    assert any("save memory here, not time" in line for line in said)
