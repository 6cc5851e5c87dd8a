"""Rope types in running engines: the same bits where a type promises them, others where it does not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thor_spec.nano import shipped
from thor_spec.vllm_plugin import interpreter, seam

NATIVE = 8192
ENGINES = Path(__file__).with_name("rope_engines.py")
KINDS = ("default", "identity_beyond_native", "yarn")
pytestmark = [
    pytest.mark.skipif(
        seam.has_gpu_build(), reason="not run: for the CPU build; benchmarks/rope_study.py runs on GPUs"
    ),
    pytest.mark.skipif(shipped.find(shipped.TARGET) is None, reason="not run: nano-hybrid is not shipped here"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What engines answer: vLLM's own, and one for each type."""
    out = tmp_path_factory.mktemp("engines") / "out.json"
    environment = {
        **os.environ,
        **interpreter.environment(os.pathsep.join(path for path in sys.path if path)),
        "VLLM_PLUGINS": "thor_spec",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    ropes = {"stock": None, **{kind: {"type": kind, "native": NATIVE, "factor": 2.0} for kind in KINDS}}
    argv = [sys.executable, str(ENGINES), json.dumps(ropes), str(out)]
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert out.exists(), (ended.stdout + ended.stderr)[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", ["default", "identity_beyond_native"])
def test_within_native_not_a_bit_differs(said: Any, kind: str) -> None:
    ours, stock = said[kind], said["stock"]
    assert len(ours["near"]) >= 20
    assert ours["near"] == stock["near"]  # tokens, and the log-probability of every token of every prompt
    mine, theirs = np.array(ours["far"]["logprobs"]), np.array(stock["far"]["logprobs"])
    assert len(mine) > NATIVE
    assert np.array_equal(mine[: NATIVE - 1], theirs[: NATIVE - 1])
    if kind == "default":
        assert np.array_equal(mine, theirs)
    else:  # the control: beyond native, the switch does something
        assert np.abs(mine[NATIVE:] - theirs[NATIVE:]).max() > 0.05


def test_what_scales_differs_everywhere(said: Any) -> None:
    ours, stock = said["yarn"], said["stock"]
    assert all(mine["logprobs"] != theirs["logprobs"] for mine, theirs in zip(ours["near"], stock["near"], strict=True))
    mine, theirs = np.array(ours["far"]["logprobs"]), np.array(stock["far"]["logprobs"])
    assert np.abs(mine[NATIVE:] - theirs[NATIVE:]).max() > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_rotated_by_is_read_back(said: Any, kind: str) -> None:
    target = said[kind]["effective"]["target"]
    assert (target["type"], target["native"], target["factor"]) == (kind, NATIVE, 2.0)
    assert (target["rows"], target["rotary_dim"], target["layers"]) == (2 * NATIVE, 32, 2)
    assert said[kind]["module"] == said["stock"]["module"] == "RotaryEmbedding"  # fused kernels are chosen by it
    assert said[kind]["address_kept"]  # captured graphs replay it


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
def test_an_ignored_setting_is_seen(said: Any, fault: str, says: str) -> None:
    assert says in said["refused"][fault]
