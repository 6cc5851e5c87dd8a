"""Rope types in running engines: the same bits where a type promises them, others where it does not.

Each engine runs in a process of its own, on nano-hybrid and on a made-up Qwen3.5 with interleaved M-RoPE.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thor_spec.nano import shipped
from thor_spec.vllm_plugin import interpreter, seam

NATIVE = 8192
pytestmark = [
    pytest.mark.skipif(
        seam.has_gpu_build(), reason="not run: written for the CPU build; benchmarks/rope_study.py runs on GPUs"
    ),
    pytest.mark.skipif(shipped.find(shipped.TARGET) is None, reason="not run: nano-hybrid is not shipped here"),
    pytest.mark.timeout(300),
]
ENGINE = Path(__file__).with_name("rope_engine.py")
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return what runs an engine with a rope and returns what it said and how it ended."""
    done: dict[str, Any] = {}

    def run(rope: dict[str, Any] | None, **job: Any) -> Any:
        key = json.dumps([rope, job])
        if key not in done:
            out = tmp_path_factory.mktemp("engine") / "out.json"
            environment = {
                **os.environ,
                **interpreter.environment(os.pathsep.join(path for path in sys.path if path)),
                "VLLM_PLUGINS": "thor_spec",
                "VLLM_USE_V2_MODEL_RUNNER": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "OMP_NUM_THREADS": "1",
            }
            argv = [sys.executable, str(ENGINE), json.dumps({"rope": rope, **job}), str(out)]
            ended = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
            said = json.loads(out.read_text()) if out.exists() else None
            done[key] = (said, ended.stdout + ended.stderr)
        return done[key]

    return run


def said(found: Any) -> Any:
    content, log = found
    assert content is not None, log[-3000:]
    return content


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "native": NATIVE, "factor": 2.0, **fields}


PROMPTS = {"near": 24, "far": 1}


@pytest.fixture(scope="module")
def stock(engine: Run) -> Any:
    return said(engine(None, **PROMPTS, rows=2 * NATIVE))


@pytest.mark.parametrize("kind", ["default", "identity_beyond_native"])
def test_within_native_not_a_bit_differs(engine: Run, stock: Any, kind: str) -> None:
    ours = said(engine(rope(kind), **PROMPTS))
    assert len(ours["near"]) == 24
    for mine, theirs in zip(ours["near"], stock["near"], strict=True):
        assert mine["tokens"] == theirs["tokens"]
        assert mine["logprobs"] == theirs["logprobs"]
    mine, theirs = np.array(ours["far"][0]["logprobs"]), np.array(stock["far"][0]["logprobs"])
    assert np.array_equal(mine[: NATIVE - 1], theirs[: NATIVE - 1])
    assert np.array_equal(mine, theirs) is (kind == "default")
    if kind != "default":
        assert np.abs(mine[NATIVE:] - theirs[NATIVE:]).max() > 0.05  # the switch does something


@pytest.mark.parametrize("kind", ["yarn", "nope"])
def test_other_types_differ(engine: Run, stock: Any, kind: str) -> None:
    ours = said(engine(rope(kind), **PROMPTS))
    assert ours["effective"]["target"]["type"] == kind
    assert ours["effective"]["target"]["rows"] >= 2 * NATIVE
    assert ours["module"] == stock["module"] == "RotaryEmbedding"
    near = [a["logprobs"] != b["logprobs"] for a, b in zip(ours["near"], stock["near"], strict=True)]
    assert all(near)
    mine, theirs = np.array(ours["far"][0]["logprobs"]), np.array(stock["far"][0]["logprobs"])
    assert np.abs(mine[NATIVE:] - theirs[NATIVE:]).max() > 0.05
    assert ours["address_kept"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("value", "is off by"),
        ("short", "may be used"),
        ("replaced", "was replaced after it was set"),
        ("unused", "does not rotate by the table"),
        ("missing", "did not reach the target"),
    ],
)
def test_an_ignored_setting_stops_the_start(engine: Run, fault: str, says: str) -> None:
    content, _ = engine(rope("yarn"), faults=["value", "short", "replaced", "unused", "missing"])
    assert content is not None
    assert says in content["refused"][fault]
