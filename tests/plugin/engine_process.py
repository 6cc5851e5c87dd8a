"""Engines in a process of their own: a script of this folder takes a job and leaves what came out."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from thor_spec.vllm_plugin import interpreter


def run(script: str, job: Any, out: Path) -> Any:
    """Return what ``script`` writes into ``out``, as JSON, when it is given ``job``."""
    environment = {
        **os.environ,
        **interpreter.environment(os.pathsep.join(path for path in sys.path if path)),
        "VLLM_PLUGINS": "thor_spec",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    argv = [sys.executable, str(Path(__file__).with_name(script)), json.dumps(job), str(out)]
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert out.exists(), (ended.stdout + ended.stderr)[-4000:]
    return json.loads(out.read_text())
