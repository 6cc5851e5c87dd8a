"""Where we touch vLLM for what the prefix cache keeps and finds."""

from thor_spec.vllm_plugin.seam import Seam

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
SCHEDULE = Seam(
    target="vllm.v1.core.sched.scheduler:Scheduler.schedule",
    signature=("self", "throttle_prefills"),
    why="choose how many tokens the coming step drafts",
    drop_when="vLLM chooses by depth and measured gain itself",
)
UPDATE_FROM_OUTPUT = Seam(
    target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    signature=("self", "scheduler_output", "model_runner_output"),
    why="learn how many tokens a step brought, and how long it took",
    drop_when="vLLM chooses by depth and measured gain itself",
)
BLOCK_DROP = Seam(
    target="vllm.config.speculative:SpeculativeConfig.use_eagle_block_drop",
    signature=("self",),
    why="keep the last block of a hit, which DFlash has no reason to drop",
    drop_when="the CPU extra moves to vLLM 0.33, which does (vllm#54163)",
)
