"""Run engines with several ropes on nano-hybrid, one after the other: ``rope_engines.py JOB OUT``.

In one process, because importing vLLM takes longer than anything else here.
"""

import copy
import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

from thor_spec.errors import ConfigError
from thor_spec.nano import shipped

NATIVE = 8192
NEAR, NEW_TOKENS, BEYOND = 20, 3, 256
FAULTS = ("value", "short", "replaced", "unused", "missing")


def main(ropes: dict[str, Any], out: Path) -> None:
    """Write what each engine answered; then what reading back says of planted faults, in the last one."""
    from vllm.distributed import cleanup_dist_env_and_memory

    said: dict[str, Any] = {}
    for name, rope in ropes.items():
        engine = _engine(rope)
        said[name] = _answers(engine)
        if rope and name == list(ropes)[-1]:
            said["refused"] = {fault: _planted(fault, engine) for fault in FAULTS}
        del engine
        cleanup_dist_env_and_memory()
        gc.freeze()  # what was imported is no garbage, and the next engine need not look through it
    out.write_text(json.dumps(said))


def _engine(rope: Any) -> Any:
    from vllm import LLM

    return LLM(
        str(shipped.find(shipped.TARGET)),
        max_model_len=2 * NATIVE,
        max_num_seqs=1,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
        additional_config={"thor_spec": {"runner_kernels": "torch", **({"rope": rope} if rope else {})}},
        hf_overrides={"max_position_embeddings": 2 * NATIVE},
    )


def _attention(engine: Any) -> Any:
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    return next(module for module in model.modules() if hasattr(module, "rotary_emb"))


def _answers(engine: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    from thor_spec.vllm_plugin import rope

    rng = random.Random(0)

    def answer(length: int, tokens: int) -> dict[str, Any]:
        prompt = {"prompt_token_ids": [rng.randrange(300, 3800) for _ in range(length)]}
        sampling = SamplingParams(max_tokens=tokens, temperature=0, prompt_logprobs=0, flat_logprobs=True)
        (output,) = engine.generate([prompt], sampling, use_tqdm=False)
        found = output.prompt_logprobs
        logprobs = [found.logprobs[start] for start in found.start_indices[1:]]
        return {"tokens": list(output.outputs[0].token_ids), "logprobs": logprobs}

    module = _attention(engine).rotary_emb
    address = module.cos_sin_cache.data_ptr()
    return {
        "near": [answer(rng.randrange(20, 60), NEW_TOKENS) for _ in range(NEAR)],
        "far": answer(NATIVE + BEYOND, 1),
        "effective": rope.effective(engine.llm_engine.vllm_config),
        "module": type(module).__name__,
        "address_kept": module.cos_sin_cache.data_ptr() == address,
    }


def _planted(fault: str, engine: Any) -> str:
    from thor_spec.vllm_plugin import rope

    attention = _attention(engine)
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
        else:
            rope._placed.clear()
        rope.effective(engine.llm_engine.vllm_config)
    except ConfigError as error:
        return str(error)
    finally:
        attention.rotary_emb, module.cos_sin_cache, module._forward_method = module, table, forward
        rope._placed.update(placed)
    return "nothing"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
