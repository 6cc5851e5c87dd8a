"""Run an engine with a drafter, and tell what was drafted: ``drafts_engine.py JOB OUT``.

With ``idle`` two steps of five draft nothing.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any], out: Path) -> None:
    """Write each prompt's answer, for each step with drafts the last token, its position, and the drafts behind it;
    and of all steps, how many drafted nothing and how often the drafter ran."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        job["target"], dtype="float32", max_model_len=512, max_num_seqs=1, enforce_eager=True, seed=0,
        enable_prefix_caching=False, kv_cache_memory_bytes=1 << 26, skip_tokenizer_init=True,
        speculative_config={
            "method": "dflash", "model": job["drafter"], "num_speculative_tokens": job["drafts"],
            **({"num_speculative_tokens_per_batch_size": [[1, 1, job["drafts"]]]} if job["idle"] else {}),
        },
        additional_config={"thor_spec": {"runner_kernels": "torch"}},
    )  # fmt: skip
    core: Any = engine.llm_engine.engine_core
    speculator = core.engine_core.model_executor.driver_worker.worker.model_runner.speculator
    stock, steps, counts = speculator.propose, [], {"idle": 0, "passes": 0}
    run_model, scheduler = speculator._run_model, core.engine_core.scheduler
    schedule, lengths = scheduler.schedule, itertools.cycle([job["drafts"]] * 3 + [0] * 2)

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts["passes"] += 1
        return run_model(*args, **kwargs)

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        scheduler.dynamic_sd_lookup = [next(lengths)] * 2
        return schedule(*args, **kwargs)

    def propose(*args: Any, **kwargs: Any) -> Any:
        drafts = stock(*args, **kwargs)
        if kwargs["num_speculative_tokens"] == 0:
            counts["idle"] += 1
            return drafts
        inputs = speculator.input_buffers
        steps.append(
            {"position": int(inputs.positions[0]), "token": int(inputs.input_ids[0]), "drafts": drafts[0].tolist()}
        )
        return drafts

    speculator.propose, speculator._run_model = propose, counted
    if job["idle"]:
        scheduler.schedule = scheduled
    asked = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
    answers = []
    for prompt in job["prompts"]:
        steps.clear()
        counts.update(idle=0, passes=0)
        (found,) = engine.generate([TokensPrompt(prompt_token_ids=prompt)], asked, use_tqdm=False)
        tokens = list(found.outputs[0].token_ids)
        last = len(prompt) + len(tokens) - 1
        known = [step for step in steps if step["position"] <= last]
        answers.append({"tokens": tokens, "steps": known, "drafted": len(steps), **counts})
    out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
