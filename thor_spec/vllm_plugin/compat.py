"""Every touch on vLLM, in one list. Nothing else in the package imports from vLLM."""

import importlib.metadata

from thor_spec.errors import PlatformError, SeamMovedError
from thor_spec.vllm_plugin.options import NAME
from thor_spec.vllm_plugin.seam import Seam, has_gpu_build, require_supported_version

PLUGIN_GROUP = "vllm.general_plugins"
COMMAND_LINE = "vllm.entrypoints.cli.main"
"""The module of the ``vllm`` program, which alone can start a node without an API."""

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
    target="vllm.sampling_params:SamplingParams.from_optional",
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
)
EVAL_SEAMS = (OFFLINE_ENGINE, ENGINE_ARGUMENTS, ARGUMENT_PARSER, SAMPLING_PARAMS)
ROPE_SEAMS = (ROTARY, MROTARY, ROTARY_TABLE, DFLASH_BUFFERS)
CPU_SEAMS = (REGISTER_KERNELS, CPU_SPEC_FORWARD)  # relied on only where the CPU build is installed

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
