"""When one state per sequence is chosen, and what is said where it cannot be."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import seam
from thor_spec.vllm_plugin.one_state import choice
from thor_spec.vllm_plugin.one_state.measured import MEASURED, fastest

EVIDENCE = Path(__file__).parent.parent.parent / "evidence"


def config(drafts: int = 7, state: str | None = None, **changes: Any) -> Any:
    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "enable_dbo": False}
    parallel |= {name: changes.pop(name) for name in list(changes) if name in parallel}
    return SimpleNamespace(
        **{
            "speculative_config": SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
            "parallel_config": SimpleNamespace(**parallel),
            "kv_transfer_config": None,
            "lora_config": None,
            "additional_config": {"thor_spec": {"state": state} if state else {}},
            **changes,
        }
    )


IMPOSSIBLE = [
    ({"pipeline_parallel_size": 2}, "pipeline"),
    ({"decode_context_parallel_size": 2}, "context parallelism"),
    ({"enable_dbo": True}, "micro-batches"),
    ({"kv_transfer_config": object()}, "KV connector"),
    ({"lora_config": object()}, "LoRA"),
    ({"drafts": 64}, "at most 63"),
]


def test_it_is_the_default_with_drafts() -> None:
    assert choice.reconstructs(config())
    assert choice.reconstructs(config(state="reconstruct"))
    assert choice.reconstructs(config(drafts=63))
    assert not choice.reconstructs(config(state="snapshot"))
    assert not choice.reconstructs(config(drafts=0, state="reconstruct"))


@pytest.mark.parametrize(("changes", "says"), IMPOSSIBLE)
def test_what_cannot_be_is_refused_or_told(
    changes: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not choice.reconstructs(config(**changes))
    with choice.layers_for(config(**changes)):
        pass
    assert says in caplog.text
    caplog.clear()
    with choice.layers_for(config(state="snapshot", **changes)):
        pass
    assert not caplog.text
    with pytest.raises(ConfigError, match=says):
        choice.reconstructs(config(state="reconstruct", **changes))


def test_layers_are_replaced_while_a_model_is_built() -> None:
    registry = choice.compat.OOT_LAYERS.resolve()
    with choice.layers_for(config()):
        ours = registry[choice.LAYER]
        assert ours.__name__ == "ReconstructedGDN"
        with choice.layers_for(config()):  # a model inside of a model
            assert registry[choice.LAYER] is ours
        assert registry[choice.LAYER] is ours
    assert choice.LAYER not in registry
    with pytest.raises(ZeroDivisionError), choice.layers_for(config()):
        raise ZeroDivisionError
    assert choice.LAYER not in registry
    with choice.layers_for(config(state="snapshot")):
        assert choice.LAYER not in registry


def test_shapes_and_kernels() -> None:
    assert choice.without_speculation(config()).speculative_config is None
    kept = config(state="snapshot")
    assert choice.without_speculation(kept) is kept
    assert choice.kernel(config()) == (fastest() if seam.has_gpu_build() else "native")
    wy = config()
    wy.additional_config["thor_spec"]["gdn_kernel"] = "wy"
    assert choice.kernel(wy) == "wy"
    assert choice.described(config()) == "8 per sequence (snapshot)"
    assert choice.described(config(drafts=0)) == "one per sequence"


def test_auto_is_the_fastest_lossless_kernel_of_the_records() -> None:
    for each in MEASURED:
        record = json.loads((EVIDENCE / each.record / "record.json").read_text())
        times = {case["case"]: case["us"] for case in record["cases"]}
        for batch, share in zip((1, 8, 64), each.of_vllms_time, strict=True):
            us = times[f"batch {batch}, chain 16"]
            assert share == pytest.approx(us[f"{each.kernel}, commit"]["median"] / us["vllm"]["median"], abs=5e-4)
    replay, wy = MEASURED
    gates = [json.loads((EVIDENCE / str(each.lossless) / "record.json").read_text()) for each in (replay, wy)]
    assert gates[0]["gate"]["identical"] > 0
    assert not gates[0]["gate"]["red"]
    assert gates[1]["name"] == "verify-lossless"
    assert gates[1]["passed"]
    assert fastest() == "wy"
    assert fastest([replay, replace(wy, lossless=None)]) == "replay"


def test_a_step_that_leaves_recurrent_layers_out_commits_nothing() -> None:
    """vLLM 0.33 tunes attention kernels with such steps at start-up, on a GPU only."""
    from thor_spec.vllm_plugin.one_state.steps import Steps

    steps = Steps.__new__(Steps)
    steps.layers, steps.pending = [SimpleNamespace(prefix="layers.0")], (object(), object())
    steps.prepared(object(), {"layers.3.attn": object()}, for_capture=False)
    assert steps.pending is None
    batch, masks = object(), object()
    steps.prepared(batch, {"layers.0": SimpleNamespace(spec_sequence_masks=masks)}, for_capture=False)
    assert steps.pending == (batch, masks)
