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
_TAIL = "keep no block of the drafter's for tokens of a prompt that have slid out of its window within one step"
_TAIL_GONE = "vLLM's sliding windows do so by themselves"


def _tail(target: str, *signature: str) -> Seam:
    return Seam(target=target, signature=signature or None, why=_TAIL, drop_when=_TAIL_GONE)


_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_REGISTRY = "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry"
WINDOW_SPEC = _tail("vllm.v1.kv_cache_interface:SlidingWindowSpec")
WINDOW_ADMISSION = _tail(
    "vllm.v1.kv_cache_interface:SlidingWindowSpec.max_admission_blocks_per_request",
    "self", "max_in_flight_tokens", "max_model_len",
)  # fmt: skip
WINDOW_MANAGER = _tail(f"{_MANAGERS}:SlidingWindowManager")
WINDOW_COUNT = _tail(
    f"{_MANAGERS}:SingleTypeKVCacheManager.get_num_blocks_to_allocate",
    "self", "request_id", "num_tokens", "new_computed_blocks", "total_computed_tokens", "num_local_computed_tokens",
    "num_tokens_main_model", "apply_admission_cap", "prefill_end",
)  # fmt: skip
WINDOW_ALLOCATE = _tail(
    f"{_MANAGERS}:SingleTypeKVCacheManager.allocate_new_blocks",
    "self", "request_id", "num_tokens", "num_tokens_main_model",
)  # fmt: skip
WINDOW_FREE = _tail(
    f"{_MANAGERS}:SingleTypeKVCacheManager._remove_blocks_in_range", "self", "request_id", "first_block", "last_block"
)
SPEC_REGISTER = _tail(f"{_REGISTRY}.register", "cls", "kvcache_spec_cls", "manager_class", "uniform_type_base_spec")
SPEC_REGISTERED = _tail(f"{_REGISTRY}._ensure_registered", "cls", "vllm_config")
