"""Where we touch vLLM for what the drafter's own cache takes."""

from thor_spec.vllm_plugin.seam import Seam

_PAGES = "give the drafter's cache blocks of as many bytes as the target's"
_EQUAL = "vLLM takes fewer tokens for wider layers, instead of padding all other blocks"

DRAFT_LAYER_WINDOW = Seam(
    target="vllm.model_executor.models.qwen3_dflash:_resolve_layer_attention",
    signature=("config", "layer_idx"),
    why="have all of a drafter's layers slide, by use_swa and swa_window_size in dflash_config",
    drop_when="vLLM has an option for it",
)
LAYER_CACHE_SPEC = Seam(
    target="vllm.model_executor.layers.attention.attention:Attention.get_kv_cache_spec",
    signature=("self", "vllm_config"),
    why=_PAGES,
    drop_when=_EQUAL,
)
KERNEL_TAKES_BLOCK = Seam(
    target="vllm.v1.attention.backend:AttentionBackend.supports_block_size",
    signature=("cls", "block_size"),
    why=_PAGES,
    drop_when=_EQUAL,
)
