"""Where we touch vLLM for how drafts are judged."""

from thor_spec.vllm_plugin.seam import Seam

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
GUMBEL_SAMPLE = Seam(
    target="vllm.v1.worker.gpu.sample.gumbel:gumbel_sample",
    signature=(
        "logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature", "is_drafting",
        "logits_cache", "logits_cache_col", "use_fp64", "logits_cache_source",
    ),
    why="draw tokens by each request's seed",
    drop_when="never: every request's draws are its seed's",
)  # fmt: skip
