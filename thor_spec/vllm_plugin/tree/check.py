"""Runs an engine over a random schedule with the invariants watched, and writes what it found as JSON.

python -m thor_spec.vllm_plugin.tree.check JOB RESULT PROGRESS; started by ``gates.tree``, under the guard. In
PROGRESS is a line that says how far it has come.
"""

import functools
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thor_spec import whole_file
from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.options import NAME
from thor_spec.vllm_plugin.tree import faults
from thor_spec.vllm_plugin.tree.watch import Watch

LONGEST_ANSWER = 48
SHARE = 0.05
"""Of the device's memory, which vLLM wants free at its start: the cache has a size of its own."""


def main() -> None:
    """Run a job: without faults first, then with each fault that is to be seen, all in one engine."""
    job, result, progress = (Path(argument) for argument in sys.argv[1:])
    given = json.loads(job.read_text())

    tell = functools.partial(whole_file.write, progress)

    tell("loads the engine")
    llm = engine_of(given)
    wanted = given["verified_rows"]
    found = {"": _watched(llm, given, "", rows=wanted, tell=lambda rows: tell(f"{rows} of {wanted} rows verified"))}
    for number, fault in enumerate(given["faults"], start=1):
        tell(f"planted {number} of {len(given['faults'])}: {fault}")
        found[fault] = _watched(llm, given, fault, rows=given["faulty_rows"], tell=lambda _: None)
    result.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # an engine that was broken on purpose does not end in good order


def engine_of(job: Mapping[str, Any]) -> Any:
    """Return the engine that a job is about."""
    return compat.LLM.resolve()(
        job["target"],
        max_model_len=job["context"],
        max_num_seqs=job["rows"],
        max_num_batched_tokens=max(job["context"], 256),
        enforce_eager=True,  # what a graph replays cannot be looked at in between
        async_scheduling=False,  # nor what has been scheduled ahead
        enable_prefix_caching=False,
        kv_cache_memory_bytes=job["kv_cache_bytes"],
        gpu_memory_utilization=SHARE,
        seed=0,
        speculative_config={
            "method": "dflash",
            "model": job["drafter"],
            "num_speculative_tokens": job["nodes"],
        },
        additional_config={NAME: job["options"], **job["additional"]},
    )


def _watched(llm: Any, job: Mapping[str, Any], fault: str, *, rows: int, tell: Callable[[int], None]) -> dict[str, Any]:
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    intact = faults.Intact(runner)
    if fault:
        faults.plant(fault, runner)
    watch = Watch(runner, seed=job["seed"], every=1 if fault else 8)
    try:
        steps = _play(llm, watch, job, rows=rows, tell=tell)
    finally:
        intact.restore()
    return {**watch.counts, "steps": steps, "told": watch.told, "layers": len(watch.layers)}


def _play(llm: Any, watch: Any, job: Mapping[str, Any], *, rows: int, tell: Callable[[int], None]) -> int:
    """Answer random requests until enough rows were verified; return the steps."""
    sampling = compat.SAMPLING_PARAMS.resolve()
    engine, rng = llm.llm_engine, random.Random(job["seed"])
    scheduler = engine.engine_core.engine_core.scheduler
    texts: Sequence[list[int]] = [llm.get_tokenizer().encode(text) for text in job["prompts"]]
    longest = job["context"] - LONGEST_ANSWER - 2
    asked = steps = 0
    while (verified := sum(watch.rows_of(kind) for kind in ("chain", "tree"))) < rows:
        tell(verified)
        while len(scheduler.running) + len(scheduler.waiting) < job["rows"]:
            tokens = rng.choice(texts)
            tokens = (tokens * 4)[rng.randrange(len(tokens)) :][: rng.randint(1, longest)]
            greedy = rng.random() < 0.5
            params = sampling(
                temperature=0.0 if greedy else rng.choice([0.7, 1.0]), seed=asked, ignore_eos=True, detokenize=False,
                max_tokens=rng.randint(2, LONGEST_ANSWER), repetition_penalty=1.1 if rng.random() < 0.1 else 1.0,
            )  # fmt: skip
            engine.add_request(f"r{asked}", {"prompt_token_ids": tokens}, params)
            asked += 1
        for request in scheduler.running:
            if rng.random() < 0.2:
                request.spec_token_ids = request.spec_token_ids[: rng.randint(0, job["nodes"])]
        engine.step()
        steps += 1
    engine.abort_request([request.request_id for request in (*scheduler.running, *scheduler.waiting)], internal=True)
    return steps


if __name__ == "__main__":
    main()
