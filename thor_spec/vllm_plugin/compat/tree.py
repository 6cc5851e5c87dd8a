"""Where we touch vLLM for draft trees."""

from thor_spec.vllm_plugin.seam import Seam

_TREE = "draft trees instead of chains"
_TREE_UPSTREAM = "vLLM verifies draft trees on hybrids itself (vllm#54080)"


def _tree(target: str, *signature: str) -> Seam:
    return Seam(target=target, signature=signature or None, why=_TREE, drop_when=_TREE_UPSTREAM)


_SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode"
INIT_SPECULATOR = _tree(f"{_SPEC_DECODE}:init_speculator", "vllm_config", "device", "req_states")
_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
MODEL_RUNNER = _tree(_RUNNER)
EXECUTE_MODEL = _tree(
    f"{_RUNNER}.execute_model",
    "self",
    "scheduler_output",
    "intermediate_tensors",
    "dummy_run",
    "skip_attn_for_dummy_run",
    "is_profile",
    "context_len",
    "valid_dummy_state_slots",
    "randomize_inputs",
)
SAMPLE_TOKENS = _tree(f"{_RUNNER}.sample_tokens", "self", "grammar_output")
CAPTURE_MODEL = _tree(f"{_RUNNER}.capture_model", "self", "*", "profile_only")
GRAPH_CANDIDATES = _tree("vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates", "self")
SCHEDULER_OUTPUT = _tree("vllm.v1.core.sched.output:SchedulerOutput")
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
PREPARE_DUMMY_INPUTS = _tree(
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_dummy_inputs", "self", "num_reqs", "num_tokens"
)
