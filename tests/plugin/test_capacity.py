"""The plan's cut of the cache into groups, against the functions of the installed vLLM; no engine is started."""

import importlib
import importlib.util
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.shapes import DRAFTER_35B, QWEN35_35B
from thor_spec.capacity import blocks
from thor_spec.capacity.shape import ModelShape
from thor_spec.vllm_plugin.drafter_cache import fitting_block


def _specs(
    target: ModelShape,
    drafter: ModelShape | None,
    block: int,
    page: int,
    drafts: int,
    *,
    window: int | None = None,
    sliding: int = 0,
    fitted: bool = False,
) -> dict[str, Any]:
    """Return what the layers tell vLLM, with the page that its platform code pads states to."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    def attention(shape: ModelShape, layer: int) -> Any:
        size: dict[str, Any] = {"num_kv_heads": shape.attention.kv_heads, "head_size": shape.attention.head_dim}
        size |= {"block_size": block, "dtype": torch.bfloat16}
        if shape is target or layer >= sliding:
            spec: Any = FullAttentionSpec(**size)
        else:
            spec = SlidingWindowSpec(**size, sliding_window=window)
        fits = fitting_block(block, spec.page_size_bytes, page) if fitted and shape is not target else None
        return replace(spec, block_size=fits) if fits and fits % 16 == 0 else spec

    delta = target.delta_net
    assert delta is not None
    state = MambaSpec(
        shapes=(
            (delta.channels, delta.taps - 1 + (0 if fitted else drafts)),
            (delta.value_heads, delta.value_dim, delta.key_dim),
        ),
        dtypes=(torch.bfloat16, torch.float32),
        block_size=32768,
        page_size_padded=page,
        num_speculative_blocks=0 if fitted else drafts,
    )
    found = {f"target.{i}": attention(target, i) for i in range(target.attention.layers)}
    found |= {f"state.{i}": state for i in range(delta.layers)}
    return found | ({f"draft.{i}": attention(drafter, i) for i in range(drafter.attention.layers)} if drafter else {})


@pytest.mark.parametrize("window", [None, 1024, "its own"])
@pytest.mark.parametrize("kind", ["snapshot", "reconstruct"])
@pytest.mark.parametrize("seed", range(24))
def test_groups_and_blocks_are_vllm_s(seed: int, kind: blocks.StateKind, window: int | str | None) -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from thor_spec.vllm_plugin.drafter_tail import tail_of

    planning = "kv_cache_planning" if importlib.util.find_spec("vllm.v1.core.kv_cache_planning") else "kv_cache_utils"
    vllm_blocks = importlib.import_module(f"vllm.v1.core.{planning}")

    rng = random.Random(seed)
    drafts = rng.choice((0, 3, 7, 15))
    layers = rng.choice((8, 24, 40, 64))
    config = {**QWEN35_35B, "num_hidden_layers": layers, "num_key_value_heads": rng.choice((2, 4))}
    config["full_attention_interval"] = rng.choice((2, 4))  # with 2, kinds of nearly as many layers are padded
    target = ModelShape.parse("target", {**config, "linear_num_value_heads": rng.choice((16, 32, 48))})
    heads = rng.choice((4, 8))
    draft_layers = rng.choice((1, 5, 8, target.attention.layers + 1))
    sizes = {**DRAFTER_35B, "num_key_value_heads": heads, "num_hidden_layers": draft_layers}
    sliding = {None: 0, 1024: draft_layers}.get(window, rng.randint(1, draft_layers))
    if window == "its own":
        window = None
        kinds = ["sliding_attention"] * sliding + ["full_attention"] * (draft_layers - sliding)
        sizes |= {"layer_types": kinds, "sliding_window": 2048}
    drafter = ModelShape.parse("drafter", sizes)
    batches, batched = rng.choice((1, 2)), rng.choice((512, 4096, 32768))
    ours = blocks.layout(
        target,
        drafter if drafts else None,
        drafts=drafts,
        kind=kind,
        kv_dtype="auto",
        state_dtype="float32",
        drafter_window=window,
        batches=batches,
        batched_tokens=batched,
    )
    fitted = kind == "reconstruct"
    token = target.attention.bytes_per_token(2)
    assert target.delta_net is not None
    state = target.delta_net.state_bytes(4) + target.delta_net.conv_bytes(2, 0 if fitted else drafts)
    block = 16 * -(-state // (16 * token))
    config_ = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(
            mamba_cache_mode="none",
            enable_prefix_caching=False,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,  # a layer's blocks side by side, as on CUDA
        ),
        model_config=SimpleNamespace(max_model_len=32768),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1
        ),
        speculative_config=None,
        kv_transfer_config=None,
        max_in_flight_tokens=batches * batched,
        max_concurrent_batches=batches,
        num_speculative_tokens=drafts,
    )
    specs = _specs(
        target,
        drafter if drafts else None,
        block,
        block * token,
        drafts,
        window=window or drafter.window,
        sliding=sliding,
        fitted=fitted,
    )
    if fitted:  # what our plugin makes of a drafter's layers
        specs |= {name: tail_of(spec, config_) for name, spec in specs.items() if name.startswith("draft.")}
    theirs = vllm_blocks.get_kv_cache_groups(config_, specs)
    assert len(theirs) == len(ours.groups)
    assert max(len(group.layer_names) for group in theirs) == ours.group_layers
    assert {group.kv_cache_spec.page_size_bytes for group in theirs} == {ours.page_bytes}
    needed = sum(
        -(-group.kv_cache_spec.max_memory_usage_bytes(config_) // group.kv_cache_spec.page_size_bytes)  # type: ignore[arg-type]
        for group in theirs
    )
    assert needed == ours.blocks_per_sequence(32768)
