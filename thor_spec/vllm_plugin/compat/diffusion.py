"""Where we touch vLLM for LLaDA2 and its blocks."""

from thor_spec.vllm_plugin.seam import Seam

_SERVES_LLADA2 = "vLLM serves LLaDA2"
MODELS_CONFIG_MAP = Seam(
    target="vllm.model_executor.models.config:MODELS_CONFIG_MAP",
    signature=None,
    why="settle the engine's configuration for LLaDA2",
    drop_when=_SERVES_LLADA2,
)
DIFFUSION_CONFIG = Seam(
    target="vllm.config.diffusion:DiffusionConfig",
    signature=None,
    why="say how long a block is",
    drop_when=_SERVES_LLADA2,
)
BAILING_MOE = Seam(
    target="vllm.model_executor.models.bailing_moe:BailingMoeV2ForCausalLM",
    signature=("self", "*", "vllm_config", "prefix"),
    why="build LLaDA2 of the layers that it shares with Ling 2",
    drop_when=_SERVES_LLADA2,
)
BAILING_EXPERTS = Seam(
    target="vllm.model_executor.models.bailing_moe:BailingMoE.forward",
    signature=("self", "hidden_states"),
    why="choose experts by unrounded scores",
    drop_when=_SERVES_LLADA2,
)
ATTENTION_METADATA = Seam(
    target="vllm.v1.worker.gpu.attn_utils:build_attn_metadata",
    signature=(
        "attn_groups", "num_reqs", "num_tokens", "query_start_loc_gpu", "query_start_loc_cpu", "max_query_len",
        "seq_lens", "max_seq_len", "block_tables", "slot_mappings", "kv_cache_config", "seq_lens_cpu_upper_bound",
        "dcp_local_seq_lens", "dcp_local_seq_lens_cpu_upper_bound", "positions", "is_prefilling", "mm_req_doc_ranges",
        "model_specific_attn_metadata", "for_cudagraph_capture", "causal", "rswa_prefix_lens", "ubatch_idx",
        "fast_prefill", "req_idx",
    ),
    why="let tokens see the whole of their block and of those before it",
    drop_when=_SERVES_LLADA2,
)  # fmt: skip
PREPARE_ATTENTION = Seam(
    target="vllm.v1.worker.gpu.model_states.interface:ModelState.prepare_attn",
    signature=(
        "self", "input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups", "kv_cache_config",
        "for_capture", "ubatch_idx",
    ),
    why="let tokens see the whole of their block and of those before it",
    drop_when=_SERVES_LLADA2,
)  # fmt: skip
GRAPH_MODE = Seam(
    target="vllm.config.compilation:CUDAGraphMode",
    signature=None,
    why="know whether a step is padded for a captured graph",
    drop_when=_SERVES_LLADA2,
)
SAMPLER_OUTPUT = Seam(
    target="vllm.v1.worker.gpu.sample.output:SamplerOutput",
    signature=None,
    why="report settled tokens",
    drop_when=_SERVES_LLADA2,
)
LOGPROBS = Seam(
    target="vllm.v1.worker.gpu.sample.logprob:compute_topk_scores",
    signature=(
        "logits", "num_logprobs", "sampled_token_ids", "cu_num_logits", "logprob_token_ids_state",
        "expanded_idx_mapping", "max_per_req_token_ids", "logits_mode",
    ),
    why="report the probabilities of settled tokens",
    drop_when=_SERVES_LLADA2,
)  # fmt: skip
DIFFUSION_SCHEDULER = Seam(
    target="vllm.v1.core.sched.diffusion_scheduler:DiffusionScheduler",
    signature=None,
    why="schedule whole blocks",
    drop_when=_SERVES_LLADA2,
)
DIFFUSION_ASYNC_SCHEDULER = Seam(
    target="vllm.v1.core.sched.diffusion_scheduler:DiffusionAsyncScheduler",
    signature=None,
    why="schedule whole blocks",
    drop_when=_SERVES_LLADA2,
)
VALIDATE_DIFFUSION = Seam(
    target="vllm.sampling_params:SamplingParams._validate_diffusion",
    signature=("self", "model_config"),
    why="allow LLaDA2 the temperatures and seeds that vLLM refuses to diffusion models",
    drop_when=_SERVES_LLADA2,
)
VALIDATION_ERROR = Seam(
    target="vllm.exceptions:VLLMValidationError",
    signature=None,
    why="answer a request that cannot be served with 400",
    drop_when=_SERVES_LLADA2,
)
