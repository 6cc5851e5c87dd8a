"""Runs engines that draft trees in this process, and prints what came out as JSON. See ``test_engine``.

python -m tests.tree.drive '[{"tree": "7,3", ...}, ...]'
"""

import gc
import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from tests.state.drive import ENVIRONMENT


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
        skip_tokenizer_init=True,
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
    from vllm import SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = build(case)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    truth = {name: prompt + answer for name, (prompt, answer) in case["truth"].items()}
    if truth:
        Oracle(runner, truth, case.get("blur", 2.0))
    watch = None
    if case.get("watch"):
        watch = importlib.import_module("tests.tree.watch").Watch(runner)
    if case.get("fault"):
        importlib.import_module("tests.tree.faults").plant(case["fault"], runner)
    engine = llm.llm_engine
    for name, request in case["requests"].items():
        params = SamplingParams(**{"temperature": 0, "ignore_eos": True, "detokenize": False, **request["params"]})
        engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
    result: dict[str, Any] = {"tokens": {}, "logprobs": {}, "steps": 0}
    names = dict.fromkeys(case["requests"])
    while engine.has_unfinished_requests():
        result["steps"] += 1
        for output in engine.step():
            answer = output.outputs[0]
            result["tokens"][output.request_id] = list(answer.token_ids)
            result["logprobs"][output.request_id] = [
                {token: entry.logprob for token, entry in place.items()} for place in answer.logprobs or ()
            ]
    assert set(result["tokens"]) == set(names)
    result["drafted"] = sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_draft_tokens")
    result["accepted"] = sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
    if watch is not None:
        result["watched"] = watch.counts
    del llm, engine, runner, watch
    cleanup_dist_env_and_memory()
    gc.collect()
    return result


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    main()
