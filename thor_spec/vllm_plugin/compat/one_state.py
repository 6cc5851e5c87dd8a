"""Where we touch vLLM for one recurrent state per sequence."""

from thor_spec.vllm_plugin.seam import Seam

_ONE_STATE = "keep one recurrent state per sequence instead of one per draft position"
_REPLAYSSM = "vLLM reconstructs the states of Gated-DeltaNet layers itself (ReplaySSM, vllm#49887)"
_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"
_GDN_BACKEND = "vllm.v1.attention.backends.gdn_attn"


def reconstructing(target: str, *signature: str) -> Seam:
    return Seam(target=target, signature=signature or None, why=_ONE_STATE, drop_when=_REPLAYSSM)


GDN_LAYER = reconstructing(_GDN)
GDN_FORWARD = reconstructing(f"{_GDN}._forward_core", "self", "mixed_qkv", "b", "a", "core_attn_out")
GDN_FORWARD_CUDA = reconstructing(f"{_GDN}.forward_cuda", "self", "hidden_states")
GDN_FORWARD_CPU = reconstructing(f"{_GDN}.forward_cpu", "self", "hidden_states")
GDN_STATE_SHAPE = reconstructing(f"{_GDN}.get_state_shape", "self")
GDN_BACKEND = reconstructing(f"{_GDN_BACKEND}:GDNAttentionBackend")
GDN_METADATA = reconstructing(f"{_GDN_BACKEND}:GDNAttentionMetadata")
GDN_BUILDER = reconstructing(
    f"{_GDN_BACKEND}:GDNAttentionMetadataBuilder", "self", "kv_cache_spec", "layer_names", "vllm_config", "device"
)
GDN_BUILD = reconstructing(
    f"{_GDN_BACKEND}:GDNAttentionMetadataBuilder.build",
    "self",
    "common_prefix_len",
    "common_attn_metadata",
    "num_accepted_tokens",
    "num_decode_draft_tokens_cpu",
    "fast_build",
)
GDN_UPDATE = reconstructing(
    f"{_GDN_BACKEND}:GDNAttentionMetadataBuilder.update_block_table", "self", "metadata", "blk_table", "slot_mapping"
)
PLUGGABLE_LAYER = reconstructing("vllm.model_executor.custom_op:PluggableLayer")
OOT_LAYERS = reconstructing("vllm.model_executor.custom_op:op_registry_oot")
FORWARD_CONTEXT = reconstructing("vllm.forward_context:get_forward_context")
CONV_DIM_FIRST = reconstructing("vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first")
PREPARE_ATTN = reconstructing(
    "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.prepare_attn",
    "self",
    "input_batch",
    "cudagraph_mode",
    "block_tables",
    "slot_mappings",
    "attn_groups",
    "kv_cache_config",
    "for_capture",
    "ubatch_idx",
    "model_specific_attn_metadata",
)
POSTPROCESS_STATE = reconstructing(
    "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.postprocess_state",
    "self",
    "idx_mapping",
    "num_sampled",
    "num_computed_tokens",
)
INITIALIZE_KV_CACHE = reconstructing(
    "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.initialize_kv_cache",
    "self",
    "kv_cache_config",
    "block_tables",
)
