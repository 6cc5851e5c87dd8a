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
REGISTER_KERNELS = Seam(
    target="vllm.triton_utils.dispatcher:register_kernels",
    signature=("overrides",),
    why="run the runner's kernels in torch where there is no GPU",
    drop_when="vLLM brings native CPU kernels for the V2 runner",
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
GUMBEL_SAMPLE = _tree(
    "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample",
    "logits",
    "expanded_idx_mapping",
    "temperature",
    "seed",
    "pos",
    "apply_temperature",
    "is_drafting",
    "logits_cache",
    "logits_cache_col",
    "use_fp64",
    "logits_cache_source",
)
NO_LOGPROBS = _tree("vllm.v1.worker.gpu.sample.states:NO_LOGPROBS")
ATTENTION_LAYER = _tree("vllm.model_executor.layers.attention.attention:Attention")
LLM = _tree("vllm.entrypoints.llm:LLM")
SAMPLING_PARAMS = _tree("vllm.sampling_params:SamplingParams")
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
    INIT_SPECULATOR,
    MODEL_RUNNER,
    DFLASH_SPECULATOR,
    GRAPH_CONTEXT,
    PROPOSE,
    SAMPLE_DRAFT,
    COMPUTE_DRAFT_LOGITS,
    GET_LOGPROBS,
    GUMBEL_SAMPLE,
    NO_LOGPROBS,
    ATTENTION_LAYER,
    LLM,
    SAMPLING_PARAMS,
    PREPARE_DUMMY_INPUTS,
)
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


def target_seam(architecture: str) -> Seam:
    """Return the seam of the stock class for ``architecture``. Raises: KeyError."""
    return Seam(
        target=TARGETS[architecture],
        signature=("self", "*", "vllm_config", "prefix"),
        why=f"derive our {architecture}",
        drop_when="model states become selectable by configuration",
    )


def problems() -> dict[Seam, str | None]:
    """Return what moved at each seam, or None where nothing did."""
    seams = (*SEAMS, *(target_seam(name) for name in TARGETS), *(() if has_gpu_build() else CPU_SEAMS))
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
