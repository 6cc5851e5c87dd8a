"""Configurations with the dimensions of Qwen3.5-35B-A3B, for weights that are made up."""

import importlib
from typing import Any

DIMS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
}
DRAFTER_DIMS: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "layer_types": ["full_attention"] * 5,
    "num_target_layers": 40,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
}


def target() -> dict[str, Any]:
    """Return the target's configuration, with an MTP head.

    As Qwen3-Next, whose layers are the same, where torchvision does not load, which vLLM's Qwen3.5 imports.
    """
    common = {
        **DIMS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "dtype": "bfloat16",
    }
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # the latter where it was built for another torch
        own = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_nextn_predict_layers": 1}
        return {**common, **own, "decoder_sparse_step": 1, "mlp_only_layers": []}
    own = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1}
    return {**common, **own}


def drafter(layers: int, kv_heads: int, window: int | None) -> dict[str, Any]:
    """Return a DFlash drafter's configuration; all its layers but the last slide over ``window`` tokens, if any."""
    kinds = ["sliding_attention" if window else "full_attention"] * (layers - 1) + ["full_attention"]
    return {
        **DRAFTER_DIMS,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "layer_types": kinds,
        **({"sliding_window": window, "use_sliding_window": True} if window else {}),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "block_size": 16,
        "dtype": "bfloat16",
    }
