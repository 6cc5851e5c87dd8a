"""An engine in a process of its own: reads a job from standard input, writes what it generated to a file.

Job: ``{"engine": {…}, "overlap": bool, "runs": [{"prompts": [[id, …]], "together": bool, "denoise": {…}, "sampling":
{…}}]}``, a run with a ``"fault"`` at times. A fault is planted for its run only, and undone after it.
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    import numpy as np
    import torch
    from vllm import LLM, SamplingParams
    from vllm.platforms.cpu import CpuPlatform

    from thor_spec.diffusion import batched
    from thor_spec.vllm_plugin.llada2 import sampler, state

    def one_row_each(starts: Any, block: int) -> tuple[Any, Any, Any]:
        """A prompt seen as one block."""
        rows = len(starts) - 1
        return np.arange(rows, dtype=np.int32), starts, np.zeros(rows, dtype=np.int32)

    whole_step = batched.step

    def unstored(*args: Any) -> Any:
        """Blocks settled by the step that fills their last mask."""
        done = whole_step(*args)
        settled = done.settled | (done.blocks.tokens != args[-1]).all(dim=1)
        return dataclasses.replace(done, settled=settled)

    @contextlib.contextmanager
    def planted(fault: str | None, model_state: Any) -> Iterator[None]:
        """Break the engine."""
        build = model_state._build
        with contextlib.ExitStack() as stack:
            if fault == "causal":
                causal = mock.patch.object(model_state, "_build", lambda **kw: build(**{**kw, "causal": True}))
                stack.enter_context(causal)
            elif fault == "prompt in one block":
                stack.enter_context(mock.patch.object(state, "in_blocks", one_row_each))
            elif fault == "last change not stored":
                stack.enter_context(mock.patch.object(sampler.batched, "step", unstored))
            elif fault:
                raise ValueError(fault)
            yield

    def overlapping(stock: Any, config: Any) -> None:
        """Schedule a step while the one before it runs, as on a GPU; vLLM sees no need for it on a CPU."""
        stock(config)
        config.scheduler_config.async_scheduling = True

    job = json.loads(sys.stdin.read())
    if job["overlap"]:
        stock = CpuPlatform.check_and_update_config
        CpuPlatform.check_and_update_config = classmethod(lambda cls, config: overlapping(stock, config))
    torch.set_num_threads(1)
    engine = LLM(**job["engine"])
    runner: Any = engine.llm_engine.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
    results = []
    for run in job["runs"]:
        extra = {f"thor_spec_{name}": value for name, value in run.get("denoise", {}).items()}
        params = SamplingParams(
            **{"temperature": 0, "ignore_eos": True, **run.get("sampling", {}), "extra_args": extra}
        )
        # Salted, so that a run finds only its own prefixes.
        prompts = [{"prompt_token_ids": ids, "cache_salt": str(len(results))} for ids in run["prompts"]]
        groups = [prompts] if run["together"] else [[prompt] for prompt in prompts]
        with planted(run.get("fault"), runner.model_state):
            found = [o for group in groups for o in engine.generate(group, params, use_tqdm=False)]
            again = engine.generate(prompts[-1:], params, use_tqdm=False)
        results.append(
            {
                "tokens": [list(o.outputs[0].token_ids) for o in found],
                "again": list(again[0].outputs[0].token_ids),
                "cached": again[0].num_cached_tokens,
                "logprobs": [
                    [
                        step[token].logprob
                        for token, step in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)
                    ]
                    for o in found
                    if o.outputs[0].logprobs
                ],
            }
        )
    counted = {m.name: getattr(m, "value", None) for m in engine.get_metrics()}
    count = runner.sampler.count.counts.tolist()
    Path(sys.argv[1]).write_text(json.dumps({"runs": results, "metrics": counted, "counts": count}), encoding="utf-8")
