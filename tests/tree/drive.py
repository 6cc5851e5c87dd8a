"""Runs engines that draft trees in this process, and prints what came out as JSON. See ``test_engine``.

python -m tests.tree.drive '[{"tree": "7,3", ...}, ...]'
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from tests.state import schedule
from tests.state.drive import ENVIRONMENT, take_down
from tests.state.watch import Digests


def main() -> None:
    os.environ.update(ENVIRONMENT, VLLM_CPU_KVCACHE_SPACE="1")
    print(json.dumps([run(case) for case in json.loads(sys.argv[1])]))
    sys.stdout.flush()
    os._exit(0)  # engines that were broken on purpose do not end in good order


def build(case: dict[str, Any]) -> Any:
    """Return an ``LLM`` of a case."""
    from vllm import LLM

    drafts = case["drafts"]
    return LLM(
        case["target"],
        dtype=case.get("dtype", "float32"),
        max_model_len=case.get("context", 512),
        max_num_seqs=4,
        max_num_batched_tokens=case.get("budget", 64),
        enforce_eager=True,
        async_scheduling=False,
        enable_prefix_caching=case.get("caching", False),
        kv_cache_memory_bytes=case.get("cache_bytes", 64 << 20),
        seed=0,
        skip_tokenizer_init=not any("regex" in request["params"] for request in case["requests"].values()),
        disable_log_stats=False,
        speculative_config={"method": "dflash", "model": case["drafter"], "num_speculative_tokens": drafts},
        additional_config={"thor_spec": {"runner_kernels": "torch", **case["options"]}},
    )


class Oracle:
    """Draft logits that know the answers of ``truth``, mostly: the right token has some rank below four.

    So every accepted length and every branch occurs.
    """

    def __init__(self, runner: Any, truth: dict[str, list[int]], blur: float) -> None:
        self._runner, self._truth, self._blur = runner, truth, blur
        runner.speculator.compute_draft_logits = self

    def __call__(self, hidden: torch.Tensor, _: int = 0) -> torch.Tensor:
        speculator = self._runner.speculator
        names = {index: name for name, index in self._runner.req_states.req_id_to_index.items()}
        logits = torch.zeros(len(hidden), speculator.vocab_size)
        places = zip(speculator.sample_idx_mapping.tolist(), speculator.sample_pos.tolist(), strict=True)
        for row, (slot, position) in zip(range(len(hidden)), places, strict=False):
            rng = random.Random(f"{slot} {position}")
            for token in rng.sample(range(speculator.vocab_size), 6):
                logits[row, token] = 4 + 2 * rng.random()
            truth = self._truth.get(names.get(slot, "").partition("-")[0], [])
            if 0 <= position < len(truth):
                logits[row, truth[position]] = 6.5 - self._blur * rng.random()
        return logits


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Build one engine, and run its rounds of requests one after another."""
    from thor_spec.vllm_plugin.tree import faults
    from thor_spec.vllm_plugin.tree.runner import fit
    from thor_spec.vllm_plugin.tree.watch import Watch

    llm = build(case)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    truth = {name: prompt + answer for name, (prompt, answer) in case["truth"].items()}
    if truth:
        Oracle(runner, truth, case.get("blur", 2.0))
    if case.get("fitted"):
        runner.model_state.trees.budget.is_ready = True
        fit(runner, runner.model_state.trees.budget, rows=[1, 2], contexts=(16, 64))
        dear(runner.model_state.trees.budget)
    digests = Digests(runner)
    intact = faults.Intact(runner) if case.get("watched") else None
    watch = Watch(runner) if case.get("watched") else None
    rounds = []
    for how in case["rounds"]:
        rounds.append(play(llm, case["requests"], **how))
        if truth:  # answers that were drawn, and not the likeliest, are drafted too from now on
            truth |= {name: case["requests"][name]["prompt"] + got for name, got in rounds[-1]["tokens"].items()}
    result = {
        "rounds": rounds,
        **(watch.counts if watch is not None else {}),
        "told": watch.told if watch else [],
        "states": digests.found,
    }
    if (trees := runner.model_state.trees) is not None:
        result["counted"] = runner.rejection_sampler._counted.counts.tolist()
        result["phases"] = trees.clock.counted.counts.tolist()
        result["relaxed"] = runner.rejection_sampler._count.counts.sum(-1).tolist()
        result["budgets"] = trees.budget.counted.counts.tolist() if trees.budget is not None else []
        if watch is None:  # it takes every pass for one of requests
            result["dummy_positions"] = dummy_positions(runner)
    result["faults"] = {}
    for fault in case.get("faults", ()):
        intact.restore()
        faults.plant(fault, runner)
        watch = Watch(runner, every=1)
        play(llm, case["faulty_requests"])
        result["faults"][fault] = dict(watch.violated)
    del llm, runner, watch, digests
    take_down()
    return result


def dummy_positions(runner: Any) -> list[int]:
    """Return the least and the largest position of passes over nobody's rows, behind trees of real requests."""
    trees, width = runner.model_state.trees, runner.decode_query_len
    stock, seen = trees.positions, []

    def positions(batch: Any, given: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = stock(batch, given)
        seen.append(found["positions"][..., : batch.num_tokens_after_padding].clone())
        return found

    trees.positions = positions
    for tokens, uniform in ((1, False), (3, False), (2 * width, False), (width, True), (2 * width, True)):
        runner._dummy_run(tokens, uniform_decode=uniform)
        seen.append(trees.dummy_positions(2 * width, {})["positions"].clone())  # what a capture would read now
    del trees.positions
    every = torch.cat([one.flatten() for one in seen])
    return [int(every.min()), int(every.max())]


def dear(budget: Any) -> None:
    """Have each node cost a twentieth of a pass, whatever this machine takes: choices are the same on all."""
    budget.table.seed(1, 256, tuple(1 + n / 20 for n in budget.sizes))
    for rows in (1, 2):
        for context in (16, 64):
            budget.table.seed(rows, context, tuple(1 + n / 20 for n in budget.sizes))
    budget.table.learn = lambda *_: None


def play(llm: Any, requests: dict[str, Any], *, cut: int | None = None, preempt: bool = False) -> dict[str, Any]:
    """Answer the requests; ``cut``: with at most so many drafts, so that 0 is no speculation, or -1: at random."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    before = metrics(llm)
    for name, request in requests.items():
        given = {"temperature": 0, "ignore_eos": True, "detokenize": False, **request.get("params", {})}
        if "regex" in given:
            given["structured_outputs"] = StructuredOutputsParams(regex=given.pop("regex"))
        engine.add_request(name, {"prompt_token_ids": request["prompt"]}, SamplingParams(**given))
    result: dict[str, Any] = {"tokens": {}, "logprobs": {}, "steps": 0, "preempted": 0, "hits": 0}
    rng = random.Random(3)
    while engine.has_unfinished_requests():
        result["steps"] += 1
        for request in scheduler.running if cut is not None else ():
            request.spec_token_ids = request.spec_token_ids[: cut if cut >= 0 else rng.choice([0, 1, 2, 3, 5, 99])]
        if preempt and len(scheduler.running) > 1 and rng.random() < 0.15:
            schedule._preempt(scheduler, rng.choice(scheduler.running))
            result["preempted"] += 1
        for output in engine.step():
            answer = output.outputs[0]
            result["tokens"][output.request_id] = list(answer.token_ids)
            result["hits"] += bool(output.finished and output.num_cached_tokens)
            result["logprobs"][output.request_id] = [
                sorted((token, entry.logprob) for token, entry in place.items()) for place in answer.logprobs or ()
            ]
    return {**result, **{name: value - before[name] for name, value in metrics(llm).items()}}


def metrics(llm: Any) -> dict[str, float]:
    names = {"vllm:spec_decode_num_draft_tokens": "drafted", "vllm:spec_decode_num_accepted_tokens": "accepted"}
    found = dict.fromkeys(names.values(), 0.0)
    for metric in llm.get_metrics():
        if metric.name in names:
            found[names[metric.name]] += metric.value
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    main()
