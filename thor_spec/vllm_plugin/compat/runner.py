"""Where we touch vLLM for how the V2 runner finds our models and model states."""

from thor_spec.vllm_plugin.seam import Seam

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
PREPROCESS_STATE = Seam(
    target="vllm.v1.worker.gpu.model_states.interface:ModelState.preprocess_state",
    signature=("self", "input_batch", "block_tables", "kv_cache_config", "num_computed_tokens"),
    why="plant corruption before a step, for the gates' controls",
    drop_when="never: it is how a model state touches caches",
)
