"""Run one engine on nano-hybrid: ``rope_engine.py JOB OUT``."""

import json
import random
import sys
from pathlib import Path
from typing import Any

from thor_spec.nano import shipped

NATIVE = 8192


def main(job: dict[str, Any], out: Path) -> None:
    """Answer short prompts and a long one, and say by what was rotated; or plant faults and say what was refused."""
    from vllm import LLM

    from thor_spec.vllm_plugin import rope

    options = {"runner_kernels": "torch", **({"rope": job["rope"]} if job["rope"] else {})}
    engine = LLM(
        str(shipped.find(shipped.TARGET)),
        max_model_len=2 * NATIVE,
        max_num_seqs=1,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
        additional_config={"thor_spec": options},
        hf_overrides={"max_position_embeddings": 2 * NATIVE},
    )
    config = engine.llm_engine.vllm_config
    (model,) = [m for m, p in rope._placed.items()] or [_model(engine)]
    attention = next(m for m in model.modules() if hasattr(m, "rotary_emb"))
    if "faults" in job:
        out.write_text(
            json.dumps({"refused": {fault: _planted(fault, model, attention, config) for fault in job["faults"]}})
        )
        return
    address = attention.rotary_emb.cos_sin_cache.data_ptr()
    rng = random.Random(0)

    def answer(length: int, tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams

        prompt = {"prompt_token_ids": [rng.randrange(300, 3800) for _ in range(length)]}
        sampling = SamplingParams(max_tokens=tokens, temperature=0, prompt_logprobs=0, flat_logprobs=True)
        (output,) = engine.generate([prompt], sampling, use_tqdm=False)
        found = output.prompt_logprobs
        logprobs = [found.logprobs[start] for start in found.start_indices[1:]]
        return {"tokens": list(output.outputs[0].token_ids), "logprobs": logprobs}

    said = {
        "near": [answer(rng.randrange(20, 60), 6) for _ in range(job["near"])],
        "far": [answer(NATIVE + 512, 1) for _ in range(job["far"])],
        "effective": rope.effective(config),
        "module": type(attention.rotary_emb).__name__,
        "address_kept": attention.rotary_emb.cos_sin_cache.data_ptr() == address,
    }
    out.write_text(json.dumps(said))


def _model(engine: Any) -> Any:
    return engine.llm_engine.model_executor.driver_worker.worker.model_runner.model


def _planted(fault: str, model: Any, attention: Any, config: Any) -> str:
    """Return what reading back says of a fault; nothing stays of it."""
    import copy

    from thor_spec.errors import ConfigError
    from thor_spec.vllm_plugin import rope

    module = attention.rotary_emb
    table, forward, placed = module.cos_sin_cache, module._forward_method, dict(rope._placed)
    try:
        if fault == "value":
            module.cos_sin_cache = table.clone()
            module.cos_sin_cache[12000, 3] += 0.1
        elif fault == "short":
            module.cos_sin_cache = table[:9000]
        elif fault == "replaced":
            attention.rotary_emb = copy.deepcopy(module)
        elif fault == "unused":
            other = copy.deepcopy(module)
            other.cos_sin_cache = table.roll(1, 0)
            module._forward_method = other._forward_method
        elif fault == "missing":
            rope._placed.clear()
        rope.effective(config)
    except ConfigError as error:
        return str(error)
    finally:
        attention.rotary_emb, module.cos_sin_cache, module._forward_method = module, table, forward
        rope._placed.update(placed)
    return "nothing"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
