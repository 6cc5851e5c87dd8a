"""An engine in a process of its own, which takes its memory with it: a benchmark script runs itself again."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thor_spec.vllm_plugin import interpreter
from thor_spec.vllm_plugin.options import NAME as PLUGIN
from thor_spec.vllm_plugin.seam import has_gpu_build

ROOT = Path(__file__).parent.parent


def run_again(*arguments: str, what: str, log: Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run this script with its own arguments and these; return the JSON object of its last line.

    Args:
        what: of the engine, for the message should it fail.
        log: where its errors go.
        environment: what is set unless the caller's environment says otherwise.
    """
    variables = {
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if not has_gpu_build():
        variables |= interpreter.environment(os.environ.get("PYTHONPATH", ""))
    with log.open("w") as errors:
        done = subprocess.run(
            [sys.executable, str(Path(sys.argv[0]).resolve()), *sys.argv[1:], *arguments],
            cwd=ROOT,
            env={**(environment or {}), **os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{log.read_text()[-6000:]}\n{done.stdout[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
