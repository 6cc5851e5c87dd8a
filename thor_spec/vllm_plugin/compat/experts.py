"""Where we touch vLLM for launch configurations of mixtures of experts."""

from thor_spec.vllm_plugin.seam import Seam

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
