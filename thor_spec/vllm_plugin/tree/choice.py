"""Whether an engine drafts trees, decided from its configuration before anything is loaded."""

from typing import Any

from thor_spec.ddtree.shape import TreeShape
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin.one_state import choice as one_state
from thor_spec.vllm_plugin.options import PluginOptions


def shape(vllm_config: Any) -> TreeShape | None:
    """Return the shape of an engine's trees; None: it drafts chains, or nothing."""
    found = PluginOptions.parse(vllm_config.additional_config).tree_shape
    return found if vllm_config.speculative_config is not None else None


def deep(vllm_config: Any) -> int:
    """Return how many of the drafter's positions the engine's trees use."""
    found = shape(vllm_config)
    return found.deep(positions(vllm_config)) if found is not None else positions(vllm_config)


def rows_of_graphs(manager: Any) -> list[int]:
    """Return the numbers of requests that full graphs were captured for."""
    return [desc.num_reqs for desc in manager.graphs if desc.num_reqs]


def widths_of_graphs(manager: Any) -> set[int]:
    """Return the numbers of tokens per request that full graphs were captured for, the same for all requests."""
    return {desc.uniform_token_count for desc in manager.graphs if desc.uniform_token_count}


def positions(vllm_config: Any) -> int:
    """Return how many positions the drafter drafts in a pass."""
    block = getattr(vllm_config.speculative_config.draft_model_config.hf_config, "block_size", None)
    return int(block) - 1 if block else int(vllm_config.speculative_config.num_speculative_tokens)


def require(vllm_config: Any, found: TreeShape) -> None:
    """Raise ConfigError, naming what the engine is asked for beside trees that does not go with them."""
    speculation, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if speculation.method != "dflash":
        raise ConfigError(f"--tree needs a DFlash drafter, not {speculation.method}. Leave it out.")
    drafts = speculation.num_speculative_tokens
    if drafts != found.nodes:
        raise ConfigError(
            f"A tree of {found.nodes} nodes needs num_speculative_tokens={found.nodes}, not {drafts}. "
            "`thor-spec serve --tree` sets both."
        )
    found.deep(positions(vllm_config))
    options = PluginOptions.parse(vllm_config.additional_config)
    refused = {
        "--state snapshot: a tree is committed from one state and its record": options.state == "snapshot",
        f"draft_sample_method {speculation.draft_sample_method}: trees take the likeliest tokens": (
            speculation.draft_sample_method == "probabilistic"
        ),
        f"rejection_sample_method {speculation.rejection_sample_method}": (
            speculation.rejection_sample_method != "standard"
        ),
        "adaptive verification": bool(getattr(speculation, "enable_adaptive_verification", False)),
        "a number of drafts that depends on the batch": bool(
            getattr(speculation, "num_speculative_tokens_per_batch_size", None)
        ),
        "a watermark": getattr(vllm_config, "watermark_config", None) is not None,
        "--tree auto on several devices, which would have to agree on every step": (
            found.auto and getattr(parallel, "tensor_parallel_size", 1) > 1
        ),
        "LoRA": vllm_config.lora_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        **one_state.cut_batches(parallel),
        "a KV connector: it takes keys and values before they are in the order of the answer": (
            vllm_config.kv_transfer_config is not None
        ),
        "full graphs of mixed batches: prompts and trees take different kernels": _captures_mixed(vllm_config),
        "an 8-bit KV cache": str(vllm_config.cache_config.cache_dtype).startswith("fp8"),
    }
    if vllm_config.model_config.is_hybrid and (why := one_state.obstacle(vllm_config)):
        raise ConfigError(f"--tree needs one state per sequence, which does not work with {why}.")
    if why := next((why for why, applies in refused.items() if applies), None):
        raise ConfigError(f"--tree does not work with {why}. Leave one of them out.")


def _captures_mixed(vllm_config: Any) -> bool:
    mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    return mode is not None and mode.mixed_mode().name == "FULL"
