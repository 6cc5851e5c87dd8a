"""Runs schedules on engines in this process, and prints what came out as JSON. See ``test_engine``.

python -m tests.state.drive '[{"state": "snapshot", ...}, ...]'
"""

import copy
import gc
import importlib
import json
import os
import statistics
import sys
import time
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
    print(json.dumps([_kind(case)(case) for case in json.loads(sys.argv[1])]))
    sys.stdout.flush()
    os._exit(0)  # engines that were broken on purpose do not end in good order


def _kind(case: dict[str, Any]) -> Any:
    if "adaptive" in case:
        return adapt
    return converse if "without" in case else generate if "requests" in case else run


def converse(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Play conversations cold and warm, ``without`` one of the scheduler's mends; return what was the same."""
    from vllm import LLM

    from thor_spec.vllm_plugin import compat, scheduling, seam

    if case["without"]:
        mend = getattr(compat, case["without"])
        setattr(mend.owner(), mend.resolve().__name__, mend.resolve().__wrapped__)
    llm = LLM(
        case["target"],
        max_model_len=2048,
        max_num_seqs=4,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=True,
        seed=0,
        skip_tokenizer_init=True,
        speculative_config=drafter(case),
        additional_config=additional({}),
    )
    found = _played(llm)
    del llm
    take_down()
    scheduling.install(seam.version())
    return found


def _played(llm: Any) -> list[dict[str, Any]]:
    import random
    import uuid

    from vllm import SamplingParams

    from tests.state.schedule import TOKENS
    from thor_spec.gates import conversations
    from thor_spec.vllm_plugin import reasons

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    block = scheduler.block_size
    # As where workers are processes of their own: what they fitted their blocks to does not reach the scheduler.
    scheduler.cache_config = copy.copy(scheduler.cache_config)
    scheduler.cache_config.block_size = 3 * block // 4
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False)

    def ask(prompt: Any, salt: str) -> tuple[list[int], list[float], int]:
        (found,) = llm.generate([{"prompt_token_ids": list(prompt), "cache_salt": salt}], greedy, use_tqdm=False)
        answer = found.outputs[0]
        return (
            list(answer.token_ids),
            [e.logprob for place in answer.logprobs for e in place.values()],
            found.num_cached_tokens,
        )

    rng = random.Random(1)
    texts = [(TOKENS * 9)[(start := rng.randrange(len(TOKENS))) : start + 3 * block] for _ in range(4)]
    history = texts[0][: block - 1]
    played = [
        lambda answers: history if not answers else [*history, *answers[0], *texts[len(answers)][: block // 2]],
        lambda answers: texts[3][: 3 * block - 8],
    ]  # fmt: skip
    found = []
    for following, count in zip(played, (3, 2), strict=True):
        asked: list[Any] = []
        cold: list[Any] = []
        for _ in range(count):
            asked.append(tuple(following([answer[0] for answer in cold])))
            cold.append(ask(asked[-1], uuid.uuid4().hex))
        salt = uuid.uuid4().hex
        for number, prompt in enumerate(asked):
            warm = ask(prompt, salt)
            least = conversations.reusable(asked, number, block)
            found.append({"same": warm[:2] == cold[number][:2], "reused": warm[2], "least": least, "block": block})
    counted = scheduler.kv_cache_manager.thor_spec_account.table[:, 0].tolist()
    return [*found, dict(zip(reasons.REASONS, counted, strict=True))]


def adapt(case: dict[str, Any]) -> dict[str, Any]:
    """Answer four prompts at once with as many drafts as pay, by a clock that counts scheduled tokens."""
    from vllm import LLM, SamplingParams

    from tests.state.schedule import TOKENS
    from thor_spec.gates.lossless import tie_bound
    from thor_spec.vllm_plugin import drafting

    clock = drafting.time = _Clock()
    llm = LLM(
        case["target"],
        max_model_len=1024,
        max_num_seqs=4,
        enforce_eager=True,
        async_scheduling=False,
        kv_cache_memory_bytes=32 << 20,
        enable_prefix_caching=False,
        seed=0,
        skip_tokenizer_init=True,
        max_logprobs=-1,
        speculative_config={
            "method": "dflash",
            "model": case["drafter"],
            "num_speculative_tokens": case["drafts"],
            "num_speculative_tokens_per_batch_size": [[i, i, n] for i, n in enumerate(case["adaptive"], start=1)],
            **case.get("speculation", {}),
        },
        additional_config=additional({"adaptive_drafts": True}),
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    known = drafting.Drafting.of(scheduler)
    assert known is not None
    clock.of(known)
    prompts: list[Any] = [{"prompt_token_ids": TOKENS[at : at + 20]} for at in (0, 50, 100, 150)]
    greedy = SamplingParams(temperature=0, max_tokens=case["tokens"], ignore_eos=True, detokenize=False)
    answers = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, greedy, use_tqdm=False)]
    audits = []
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = {"prompt_token_ids": [*prompt["prompt_token_ids"], *answer]}
        one = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
        (forced,) = llm.generate([whole], one, use_tqdm=False)
        for token, place in zip(answer, forced.prompt_logprobs[-len(answer) :], strict=True):
            values = [entry.logprob for entry in place.values()]
            audits.append((max(values) - place[token].logprob) / tie_bound(statistics.pstdev(values), 4))
    steps = known._table[:, :, 0].sum(0).tolist()
    del llm, scheduler
    take_down()
    drafting.time = time
    return {"steps": steps, "answers": answers, "gaps_in_ties": audits}


def take_down() -> None:
    """Free what an engine left; what was imported is no garbage, and the next engine need not look through it."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.freeze()


class _Clock:
    """A time of one for every step, and a fifth for every token in it: what a machine takes must decide no test."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def of(self, known: Any) -> None:
        updated = known.updated

        def tick(output: Any, sampled: Any) -> None:
            self.now += 1 + output.total_num_scheduled_tokens / 20
            updated(output, sampled)

        known.updated = tick


def additional(options: dict[str, Any]) -> dict[str, Any]:
    """Return what the plugin and vLLM are told on this machine."""
    from thor_spec.vllm_plugin import seam

    if seam.has_gpu_build():
        return {"thor_spec": options, "gdn_prefill_backend": "triton"}
    return {"thor_spec": {"runner_kernels": "torch", **options}}


def drafter(case: dict[str, Any]) -> dict[str, Any]:
    """Return what drafts: DFlash, or the target's own MTP head."""
    which = {"method": "mtp"} if case.get("mtp") else {"method": "dflash", "model": case["drafter"]}
    return {**which, "num_speculative_tokens": case["drafts"], **case.get("speculation", {})}


def generate(case: dict[str, Any]) -> dict[str, Any]:
    """Build an engine as users do, and let it answer ``requests`` prompts at once; return the tokens."""
    import random

    from vllm import LLM, SamplingParams

    from tests.state.schedule import TOKENS

    llm = LLM(
        case["target"],
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=case.get("budget"),
        enforce_eager=case.get("eager", False),
        compilation_config=case.get("compilation", {}),
        enable_prefix_caching=case["caching"],
        kv_cache_memory_bytes=case["cache_bytes"],
        gpu_memory_utilization=0.3,
        seed=0,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        tensor_parallel_size=case.get("tp", 1),
        speculative_config=drafter(case),
        additional_config=additional(case["options"]),
    )
    rng = random.Random(case["seed"])
    prompts: list[Any] = []
    params = []
    for i in range(case["requests"]):
        start, length = rng.randrange(len(TOKENS)), rng.randint(1, case.get("longest_prompt", 600))
        prompts.append({"prompt_token_ids": (TOKENS * 2)[start : start + length]})
        answer = rng.randint(8, case.get("longest_answer", 96))
        params.append(
            SamplingParams(temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=answer, ignore_eos=True, logprobs=2,
                           detokenize=False)
        )  # fmt: skip
    for _ in range(case.get("rounds", 1)):
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    counts = {m.name.removeprefix("vllm:"): m.value for m in llm.get_metrics() if hasattr(m, "value")}
    cache = llm.llm_engine.vllm_config.cache_config
    reported = [cache.kv_cache_size_tokens, cache.kv_cache_max_concurrency]
    del llm
    take_down()
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [[sorted((t, e.logprob) for t, e in place.items()) for place in o.logprobs] for o in outputs],
        "accepted": counts["spec_decode_num_accepted_tokens"],
        "prompts": [prompt["prompt_token_ids"] for prompt in prompts],
        "counts": counts,
        "reported": reported,
    }


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Build an engine, run one schedule, take it down."""
    import torch
    from vllm import LLM

    from tests.state import faults, schedule, watch

    drafts, caching = case["drafts"], case["caching"]
    if case.get("interpreted_snapshots"):
        from thor_spec.vllm_plugin import compat
        from thor_spec.vllm_plugin.one_state import choice

        compat.OOT_LAYERS.resolve()[choice.LAYER] = importlib.import_module(
            "tests.state.snapshots"
        ).InterpretedSnapshots
    llm = LLM(
        case["target"],
        max_model_len=case.get("context", 1024),
        max_num_seqs=8,
        max_num_batched_tokens=case["budget"],
        enforce_eager=case.get("eager", True),
        compilation_config=case.get("compilation", {}),
        async_scheduling=False,  # what happens between steps must see the step
        tensor_parallel_size=case.get("tp", 1),
        kv_cache_memory_bytes=case["cache_bytes"],
        gpu_memory_utilization=0.3,
        enable_prefix_caching=caching,
        prefix_cache_retention_interval=None,  # states of every boundary, those of answers too
        seed=0,
        skip_tokenizer_init=True,
        speculative_config=drafter(case),
        additional_config=additional(case["options"]),
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
        shortest_prompt=case.get("shortest_prompt", 2),
        longest_answer=case["longest_answer"],
        block_size=block,
    )
    if case.get("fault"):
        faults.plant(case["fault"], runner)
    digests = watch.Digests(runner) if not case.get("fault") else None
    recurrence = watch.Recurrence(runner) if case.get("watched") else None
    poison = watch.Poison(runner, core.scheduler) if case.get("watched") else None
    seen = ""
    try:
        ran = schedule.run(engine, plan, poison or (lambda: None))
    except AssertionError as error:
        if not case.get("fault"):
            raise
        ran, seen = schedule.Ran(), str(error)
    result = {
        "seen": seen,
        "tokens": ran.tokens,
        "logprobs": ran.logprobs,
        "states": digests.found if digests else {},
        "counts": dict(ran.counts),
        "drafts": dict(ran.drafts),
        "rows": dict(ran.rows),
        "block_size": block,
        "checked": dict(recurrence.counts) if recurrence else {},
        "worst": recurrence.worst if recurrence else {},
        "watched": poison.counts["watched"] if poison else 0,
        "blocks": runner.kv_cache_config.num_blocks,
        "layers": type(watch.gdn_layers(runner)[0]).__name__,
    }
    del llm, engine, core, runner, digests, recurrence, poison
    if case.get("interpreted_snapshots"):
        del compat.OOT_LAYERS.resolve()[choice.LAYER]
    faults.mend()
    take_down()
    torch._dynamo.reset()
    return result


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    main()
