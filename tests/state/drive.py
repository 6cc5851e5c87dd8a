"""Runs schedules on engines in this process, and prints what came out as JSON. See ``test_engine``.

    python -m tests.state.drive '[{"state": "snapshot", ...}, ...]'
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_PLUGINS": "thor_spec",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    os.environ.update(ENVIRONMENT)
    print(json.dumps([run(case) for case in json.loads(sys.argv[1])]))


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Build an engine, run one schedule, take it down."""
    import torch
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from tests.state import schedule, watch

    drafts, caching = case["drafts"], case["caching"]
    llm = LLM(
        case["target"],
        max_model_len=case.get("context", 1024),
        max_num_seqs=8,
        max_num_batched_tokens=case["budget"],
        enforce_eager=True,
        kv_cache_memory_bytes=case["cache_bytes"],
        enable_prefix_caching=caching,
        seed=0,
        skip_tokenizer_init=True,
        speculative_config={
            "method": "dflash",
            "model": case["drafter"],
            "num_speculative_tokens": drafts,
            **case.get("speculation", {}),
        },
        additional_config={"thor_spec": {"runner_kernels": "torch", **case["options"]}},
    )
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    block = runner.vllm_config.cache_config.mamba_block_size if caching else 0
    plan = schedule.Schedule(
        seed=case["seed"],
        steps=case["steps"],
        drafts=drafts,
        longest_prompt=case["longest_prompt"],
        longest_answer=case["longest_answer"],
        block_size=block,
    )
    digests = watch.Digests(runner)
    recurrence = watch.Recurrence(runner) if case.get("recurrence") else None
    poison = watch.Poison(runner, core.scheduler) if case.get("poison") else None
    ran = schedule.run(engine, plan, poison or (lambda: None))
    result = {
        "tokens": ran.tokens,
        "logprobs": ran.logprobs,
        "states": digests.found,
        "counts": dict(ran.counts),
        "drafts": dict(ran.drafts),
        "rows": dict(ran.rows),
        "block_size": block,
        "checked": dict(recurrence.counts) if recurrence else {},
        "worst": recurrence.worst if recurrence else 0.0,
        "watched": poison.counts["watched"] if poison else 0,
        "blocks": runner.kv_cache_config.num_blocks,
        "layers": type(watch.gdn_layers(runner)[0]).__name__,
    }
    del llm, engine, core, runner, digests, recurrence, poison
    cleanup_dist_env_and_memory()
    gc.collect()
    torch._dynamo.reset()
    return result


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    main()
