"""An engine says the same tokens with the replacements as with the interpreted kernels."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.plugin.runner_kernels.launch import INTERPRETED

pytestmark = INTERPRETED

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.worker.gpu import input_batch
target, drafter, kernels = sys.argv[1:]
speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": 7}
engine = LLM(target, max_model_len=256, max_num_seqs=3, enforce_eager=True, kv_cache_memory_bytes=1 << 27,
             speculative_config=speculative, additional_config={"thor_spec": {"runner_kernels": kernels}})
prompts = ["def add(a, b):", "The", "for i in range("]
chosen = [dict(temperature=0.0), dict(temperature=0.8, seed=7), dict(temperature=0.8, seed=8, repetition_penalty=1.2)]
params = [SamplingParams(max_tokens=10, ignore_eos=True, logprobs=2, **c) for c in chosen]
tokens = [o.outputs[0].token_ids for o in engine.generate(prompts, params, use_tqdm=False)]
overridden = isinstance(input_batch._post_update_kernel, KernelOverride)
print(json.dumps({"tokens": [list(t) for t in tokens], "overridden": overridden}))
"""


def test_the_engine_says_the_same(tmp_path: Path) -> None:
    from thor_spec.nano import checkpoints

    target = checkpoints.ensure("tiny-hybrid")
    drafter = checkpoints.ensure(checkpoints.PAIRS["tiny-hybrid"])
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    settings = {
        "VLLM_PLUGINS": "thor_spec",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }

    def say(kernels: str) -> dict[str, Any]:
        command = [sys.executable, str(script), str(target), str(drafter), kernels]
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(json.loads(done.stdout.splitlines()[-1]))

    with ThreadPoolExecutor(2) as pool:
        triton_says, torch_says = pool.map(say, ("triton", "torch"))
    assert not triton_says["overridden"]
    assert torch_says["overridden"]
    assert torch_says["tokens"] == triton_says["tokens"]
