"""Where we touch vLLM for tables of rotary embeddings."""

from thor_spec.vllm_plugin.seam import Seam

ROTARY = Seam(
    target="vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase",
    signature=(
        "self",
        "head_size",
        "rotary_dim",
        "max_position_embeddings",
        "base",
        "is_neox_style",
        "dtype",
        "init_cache",
    ),
    why="put a rope type's table in the place of cos_sin_cache",
    drop_when="vLLM lets a plugin register rope types",
)
MROTARY = Seam(
    target="vllm.model_executor.layers.rotary_embedding.mrope:MRotaryEmbedding",
    signature=(
        "self",
        "head_size",
        "rotary_dim",
        "max_position_embeddings",
        "base",
        "is_neox_style",
        "dtype",
        "mrope_section",
        "mrope_interleaved",
        "*",
        "positions_factor",
        "scaling_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    ),
    why="put a rope type's table in the place of cos_sin_cache",
    drop_when="vLLM lets a plugin register rope types",
)
ROTARY_TABLE = Seam(
    target="vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase._compute_cos_sin_cache",
    signature=("self",),
    why="make vLLM's own table longer, bit by bit the same",
    drop_when="vLLM lets a plugin register rope types",
)
DFLASH_BUFFERS = Seam(
    target="vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model._build_fused_kv_buffers",
    signature=("self",),
    why="see that a drafter's context keys are rotated by the table that was set",
    drop_when="vLLM lets a plugin register rope types",
)
