"""The ``config.json`` fields of published models, as far as memory depends on them."""

from typing import Any

_HYBRID: dict[str, Any] = {
    "head_dim": 256,
    "vocab_size": 248320,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "mamba_ssm_dtype": "float32",
    "dtype": "bfloat16",
}
QWEN35_35B: dict[str, Any] = {
    **_HYBRID,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN35_397B: dict[str, Any] = {
    **_HYBRID,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 64,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}
DRAFTER_35B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "block_size": 16,
    "dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
}
