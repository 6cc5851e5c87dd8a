"""Every touch on vLLM, in one list. Nothing else in the package imports from vLLM."""

import importlib.metadata
import logging

from thor_spec.errors import PlatformError, SeamMovedError
from thor_spec.vllm_plugin.options import NAME
from thor_spec.vllm_plugin.seam import Seam, has_gpu_build, require_supported_version

PLUGIN_GROUP = "vllm.general_plugins"
COMMAND_LINE = "vllm.entrypoints.cli.main"
"""The module of the ``vllm`` program, which alone can start a node without an API."""
LOG = logging.getLogger("vllm.thor_spec")  # below vLLM's logger, and so in the engine's log

MODEL_REGISTRY = Seam(
    target="vllm.model_executor.models.registry:ModelRegistry",
    signature=None,
    why="register our model classes under the stock architecture names",
    drop_when="never: it is vLLM's public interface for models",
)
REGISTER_MODEL = Seam(
    target="vllm.model_executor.models.registry:_ModelRegistry.register_model",
    signature=("self", "model_arch", "model_cls"),
    why="register our model classes under the stock architecture names",
    drop_when="never: it is vLLM's public interface for models",
)
RESOLVE_MODEL_STATE = Seam(
    target="vllm.v1.worker.gpu.model_states:resolve_model_state_cls",
    signature=("vllm_config", "model"),
    why="have the V2 runner ask the model class for its model state",
    drop_when="model states become selectable by configuration",
)
DEFAULT_MODEL_STATE = Seam(
    target="vllm.v1.worker.gpu.model_states.default:DefaultModelState",
    signature=("self", "vllm_config", "model", "encoder_cache", "device"),
    why="derive the model state of attention-only targets",
    drop_when="model states become selectable by configuration",
)
HYBRID_MODEL_STATE = Seam(
    target="vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState",
    signature=("self", "vllm_config", "model", "encoder_cache", "device"),
    why="derive the model state of Gated-DeltaNet hybrids",
    drop_when="model states become selectable by configuration",
)
REJECTION_SAMPLER = Seam(
    target="vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler",
    signature=("self", "sampler", "spec_config", "device", "*", "watermark_key"),
    why="take drafts that a relaxed rule allows",
    drop_when="vLLM has a relaxed acceptance rule of its own",
)
VERIFY = Seam(
    target="vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify",
    signature=(
        "self",
        "logits",
        "draft_logits",
        "draft_sampled",
        "pos",
        "cu_num_logits",
        "idx_mapping",
        "idx_mapping_np",
        "expanded_idx_mapping",
        "expanded_local_pos",
        "seq_lens_upper_bound_np",
        "verify_draft_sampled",
    ),
    why="lift the logits of drafts between their processing and the rejection",
    drop_when="vLLM has a relaxed acceptance rule of its own",
)
CUSTOM_SAMPLER = Seam(
    target="vllm.v1.worker.gpu.model_states.interface:ModelState.custom_sampler",
    signature=("self", "sampler"),
    why="put our rejection sampler in the place of vLLM's",
    drop_when="vLLM has a relaxed acceptance rule of its own",
)
ADD_REQUEST = Seam(
    target="vllm.v1.worker.gpu.model_states.interface:ModelState.add_request",
    signature=("self", "req_index", "new_req_data"),
    why="learn each request's rule",
    drop_when="vLLM has a relaxed acceptance rule of its own",
)
BENCH_SERVE_ARGS = Seam(
    target="vllm.benchmarks.serve:add_cli_args",
    signature=("parser",),
    why="measure serving with vLLM's own load generator",
    drop_when="the CPU build's `vllm bench serve` finds its own metadata",
)
BENCH_SERVE = Seam(
    target="vllm.benchmarks.serve:main",
    signature=("args",),
    why="measure serving with vLLM's own load generator",
    drop_when="the CPU build's `vllm bench serve` finds its own metadata",
)
PREPROCESS_STATE = Seam(
    target="vllm.v1.worker.gpu.model_states.interface:ModelState.preprocess_state",
    signature=("self", "input_batch", "block_tables", "kv_cache_config", "num_computed_tokens"),
    why="plant corruption before a step, for the gates' controls",
    drop_when="never: it is how a model state touches caches",
)
OFFLINE_ENGINE = Seam(
    target="vllm.entrypoints.llm:LLM.from_engine_args",
    signature=("cls", "engine_args"),
    why="evaluate in one process with the engine that is served",
    drop_when="never: it is vLLM's public interface for offline use",
)
ENGINE_ARGUMENTS = Seam(
    target="vllm.engine.arg_utils:EngineArgs.from_cli_args",
    signature=("cls", "args"),
    why="evaluate with the very command line that is served",
    drop_when="never: it is vLLM's public interface for offline use",
)
ARGUMENT_PARSER = Seam(
    target="vllm.utils.argparse_utils:FlexibleArgumentParser",
    signature=None,
    why="evaluate with the very command line that is served",
    drop_when="never: it is vLLM's public interface for offline use",
)
SAMPLING_PARAMS = Seam(
    target="vllm.sampling_params:SamplingParams",
    signature=None,
    why="ask for the log-probabilities of a prompt",
    drop_when="never: it is vLLM's public interface for offline use",
)
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
RECORD_LOOKUP = Seam(
    target="vllm.v1.core.kv_cache_manager:KVCacheManager.record_prefix_cache_stats",
    signature=("self", "request", "num_hits"),
    why="tell how much of each request was reused, and why not more",
    drop_when="vLLM tells why a lookup missed",
)
ENTER_BLOCKS = Seam(
    target="vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks",
    signature=("self", "request", "num_computed_tokens"),
    why="keep what decode steps wrote out of the prefix cache, which would round otherwise than a prompt",
    drop_when="vLLM's verify steps have the bits of its prompts",
)
ALIGNED_SPLIT = Seam(
    target="vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
    signature=(
        "self",
        "request",
        "num_new_tokens",
        "num_new_local_computed_tokens",
        "num_external_computed_tokens",
    ),
    why="cut prompts at the blocks that the cache has, not at those of the configuration before they were fitted",
    drop_when="vLLM's scheduler goes by its own block size there",
)
BLOCK_DROP = Seam(
    target="vllm.config.speculative:SpeculativeConfig.use_eagle_block_drop",
    signature=("self",),
    why="keep the last block of a hit, which DFlash has no reason to drop",
    drop_when="the CPU extra moves to vLLM 0.33, which does (vllm#54163)",
)
REGISTER_KERNELS = Seam(
    target="vllm.triton_utils.dispatcher:register_kernels",
    signature=("overrides",),
    why="run the runner's kernels in torch where there is no GPU",
    drop_when="vLLM brings native CPU kernels for the V2 runner",
)

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
GUMBEL_SAMPLE = Seam(
    target="vllm.v1.worker.gpu.sample.gumbel:gumbel_sample",
    signature=(
        "logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature", "is_drafting",
        "logits_cache", "logits_cache_col", "use_fp64", "logits_cache_source",
    ),
    why="draw tokens by each request's seed",
    drop_when=_SERVES_LLADA2,
)  # fmt: skip
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
_TUNER_HANGS = "vLLM's own tuner gives up on configurations that hang"
FUSED_EXPERTS = Seam(
    target="vllm.model_executor.layers.fused_moe.fused_moe:fused_experts",
    signature=(
        "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "apply_router_weight_on_input",
        "global_num_experts", "expert_map", "quant_config",
    ),
    why="time the fused-expert kernel",
    drop_when=_TUNER_HANGS,
)  # fmt: skip
OVERRIDE_MOE_CONFIG = Seam(
    target="vllm.model_executor.layers.fused_moe:override_config",
    signature=("config",),
    why="launch the fused-expert kernel as we say",
    drop_when=_TUNER_HANGS,
)
MOE_CONFIG_FILE = Seam(
    target="vllm.model_executor.layers.fused_moe.fused_moe:get_config_file_name",
    signature=("E", "N", "dtype", "block_shape"),
    why="name the file that vLLM reads",
    drop_when=_TUNER_HANGS,
)

CPU_SPEC_FORWARD = Seam(
    target="vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_spec_forward",
    signature=(
        "layer",
        "attn_metadata_i",
        "mixed_qkv_spec",
        "b_spec",
        "a_spec",
        "conv_buf",
        "ssm_state",
        "width",
        "state_len",
    ),
    why="pad verify rows that have fewer than K drafts, which the CPU convolution misplaces",
    drop_when="the CPU extra moves to vLLM 0.33, which fixes it",
)

_ONE_STATE = "keep one recurrent state per sequence instead of one per draft position"
_REPLAYSSM = "vLLM reconstructs the states of Gated-DeltaNet layers itself (ReplaySSM, vllm#49887)"
_GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"
_GDN_BACKEND = "vllm.v1.attention.backends.gdn_attn"


def _one_state(target: str, *signature: str) -> Seam:
    return Seam(target=target, signature=signature or None, why=_ONE_STATE, drop_when=_REPLAYSSM)


GDN_LAYER = _one_state(_GDN)
GDN_FORWARD = _one_state(f"{_GDN}._forward_core", "self", "mixed_qkv", "b", "a", "core_attn_out")
GDN_FORWARD_CUDA = _one_state(f"{_GDN}.forward_cuda", "self", "hidden_states")
GDN_FORWARD_CPU = _one_state(f"{_GDN}.forward_cpu", "self", "hidden_states")
GDN_STATE_SHAPE = _one_state(f"{_GDN}.get_state_shape", "self")
GDN_BACKEND = _one_state(f"{_GDN_BACKEND}:GDNAttentionBackend")
GDN_METADATA = _one_state(f"{_GDN_BACKEND}:GDNAttentionMetadata")
GDN_BUILDER = _one_state(
    f"{_GDN_BACKEND}:GDNAttentionMetadataBuilder", "self", "kv_cache_spec", "layer_names", "vllm_config", "device"
)
GDN_BUILD = _one_state(
    f"{_GDN_BACKEND}:GDNAttentionMetadataBuilder.build",
    "self",
    "common_prefix_len",
    "common_attn_metadata",
    "num_accepted_tokens",
    "num_decode_draft_tokens_cpu",
    "fast_build",
)
GDN_UPDATE = _one_state(
    f"{_GDN_BACKEND}:GDNAttentionMetadataBuilder.update_block_table", "self", "metadata", "blk_table", "slot_mapping"
)
PLUGGABLE_LAYER = _one_state("vllm.model_executor.custom_op:PluggableLayer")
OOT_LAYERS = _one_state("vllm.model_executor.custom_op:op_registry_oot")
FORWARD_CONTEXT = _one_state("vllm.forward_context:get_forward_context")
CONV_DIM_FIRST = _one_state("vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first")
PREPARE_ATTN = _one_state(
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
POSTPROCESS_STATE = _one_state(
    "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.postprocess_state",
    "self",
    "idx_mapping",
    "num_sampled",
    "num_computed_tokens",
)
INITIALIZE_KV_CACHE = _one_state(
    "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.initialize_kv_cache",
    "self",
    "kv_cache_config",
    "block_tables",
)
CPU_PREFILL = _one_state(
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_spec_aware_nonspec",
    "layer",
    "attn_metadata_i",
    "mixed_qkv",
    "b",
    "a",
    "core_attn_out",
    "conv_buf",
    "ssm_state",
    "width",
)

_TREE = "draft trees instead of chains"
_TREE_UPSTREAM = "vLLM verifies draft trees on hybrids itself (vllm#54080)"


def _tree(target: str, *signature: str) -> Seam:
    return Seam(target=target, signature=signature or None, why=_TREE, drop_when=_TREE_UPSTREAM)


_SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode"
INIT_SPECULATOR = _tree(f"{_SPEC_DECODE}:init_speculator", "vllm_config", "device", "req_states")
MODEL_RUNNER = _tree("vllm.v1.worker.gpu.model_runner:GPUModelRunner")
DFLASH_SPECULATOR = _tree(f"{_SPEC_DECODE}.dflash.speculator:DFlashSpeculator", "self", "vllm_config", "device")
GRAPH_CONTEXT = _tree(
    f"{_SPEC_DECODE}.dflash.speculator:DFlashSpeculator._num_graph_context_tokens", "self", "num_reqs"
)
PROPOSE = _tree(f"{_SPEC_DECODE}.dflash.speculator:DFlashSpeculator.propose")
SAMPLE_DRAFT = _tree(f"{_SPEC_DECODE}.speculator:DraftModelSpeculator.sample_draft")
COMPUTE_DRAFT_LOGITS = _tree(
    f"{_SPEC_DECODE}.speculator:DraftModelSpeculator.compute_draft_logits", "self", "hidden_states", "spec_step_idx"
)
GET_LOGPROBS = _tree(
    f"{_SPEC_DECODE}.rejection_sampler:RejectionSampler._get_logprobs_tensors",
    "self",
    "sampled",
    "num_sampled",
    "logits",
    "cu_num_logits",
    "cu_num_logits_np",
    "max_num_logprobs",
)
NO_LOGPROBS = _tree("vllm.v1.worker.gpu.sample.states:NO_LOGPROBS")
ATTENTION_LAYER = _tree("vllm.model_executor.layers.attention.attention:Attention")
LLM = _tree("vllm.entrypoints.llm:LLM")
PREPARE_DUMMY_INPUTS = _tree(
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_dummy_inputs", "self", "num_reqs", "num_tokens"
)

SEAMS = (
    MODEL_REGISTRY,
    REGISTER_MODEL,
    RESOLVE_MODEL_STATE,
    DEFAULT_MODEL_STATE,
    HYBRID_MODEL_STATE,
    REJECTION_SAMPLER,
    VERIFY,
    CUSTOM_SAMPLER,
    ADD_REQUEST,
    PREPROCESS_STATE,
    RECORD_LOOKUP,
    ENTER_BLOCKS,
    ALIGNED_SPLIT,
    BLOCK_DROP,
    BENCH_SERVE_ARGS,
    BENCH_SERVE,
    GDN_LAYER,
    GDN_FORWARD,
    GDN_FORWARD_CUDA,
    GDN_FORWARD_CPU,
    GDN_STATE_SHAPE,
    GDN_BACKEND,
    GDN_METADATA,
    GDN_BUILDER,
    GDN_BUILD,
    GDN_UPDATE,
    PLUGGABLE_LAYER,
    OOT_LAYERS,
    FORWARD_CONTEXT,
    CONV_DIM_FIRST,
    PREPARE_ATTN,
    POSTPROCESS_STATE,
    INITIALIZE_KV_CACHE,
    MODELS_CONFIG_MAP,
    DIFFUSION_CONFIG,
    BAILING_MOE,
    BAILING_EXPERTS,
    ATTENTION_METADATA,
    PREPARE_ATTENTION,
    GRAPH_MODE,
    SAMPLER_OUTPUT,
    GUMBEL_SAMPLE,
    LOGPROBS,
    DIFFUSION_SCHEDULER,
    DIFFUSION_ASYNC_SCHEDULER,
    VALIDATE_DIFFUSION,
    VALIDATION_ERROR,
    FUSED_EXPERTS,
    OVERRIDE_MOE_CONFIG,
    MOE_CONFIG_FILE,
    INIT_SPECULATOR,
    MODEL_RUNNER,
    DFLASH_SPECULATOR,
    GRAPH_CONTEXT,
    PROPOSE,
    SAMPLE_DRAFT,
    COMPUTE_DRAFT_LOGITS,
    GET_LOGPROBS,
    NO_LOGPROBS,
    ATTENTION_LAYER,
    LLM,
    PREPARE_DUMMY_INPUTS,
)
EVAL_SEAMS = (OFFLINE_ENGINE, ENGINE_ARGUMENTS, ARGUMENT_PARSER, SAMPLING_PARAMS)
ROPE_SEAMS = (ROTARY, MROTARY, ROTARY_TABLE, DFLASH_BUFFERS)
CPU_SEAMS = (REGISTER_KERNELS, CPU_SPEC_FORWARD, CPU_PREFILL)  # relied on only where the CPU build is installed

# Architecture -> the stock class that ours derives from. Both stay under the stock name: vLLM keeps tables by it.
TARGETS = {
    "Qwen3ForCausalLM": "vllm.model_executor.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "vllm.model_executor.models.qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "vllm.model_executor.models.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM": "vllm.model_executor.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "vllm.model_executor.models.qwen3_5:Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "vllm.model_executor.models.qwen3_5:Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration": "vllm.model_executor.models.qwen3_5:Qwen3_5MoeForConditionalGeneration",
}
DRAFTERS = {"DFlashDraftModel": "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM"}
MODELS = {**TARGETS, **DRAFTERS}

LLADA2 = "LLaDA2MoeModelLM"
"""Which no vLLM knows; registered under its published name."""
OWN_MODELS = {LLADA2: "thor_spec.vllm_plugin.llada2.model:LLaDA2MoeModelLM"}
SERVED = (*TARGETS, *OWN_MODELS)


def model_seam(architecture: str) -> Seam:
    """Return the seam of the stock class for ``architecture``. Raises: KeyError."""
    return Seam(
        target=MODELS[architecture],
        signature=("self", "*", "vllm_config", "prefix"),
        why=f"derive our {architecture}",
        drop_when="model states become selectable by configuration",
    )


def problems() -> dict[Seam, str | None]:
    """Return what moved at each seam, or None where nothing did."""
    seams = (
        *SEAMS,
        *ROPE_SEAMS,
        *EVAL_SEAMS,
        *(model_seam(name) for name in MODELS),
        *(() if has_gpu_build() else CPU_SEAMS),
    )
    return {seam: seam.problem() for seam in seams}


def require_seams() -> str:
    """Return vLLM's version. Raises: PlatformError outside the supported range; SeamMovedError, naming what moved."""
    found = require_supported_version()
    if moved := [problem for problem in problems().values() if problem]:
        more = f" ({len(moved) - 1} more: see `thor-spec doctor`)" if len(moved) > 1 else ""
        raise SeamMovedError(moved[0] + more)
    return found


def plugin_entry() -> str | None:
    """Return what vLLM would load as our plugin, or None where we are not registered with it."""
    entries = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=NAME)
    return next((entry.value for entry in entries), None)


def require_plugin() -> None:
    """Raise PlatformError where vLLM would start without us."""
    if plugin_entry() is None:
        raise PlatformError(
            "thor-spec is not registered with vLLM in this environment, so vLLM would start without it. "
            "Install it into the environment that runs vLLM: `pip install -e .`, or run `make serve` once."
        )
