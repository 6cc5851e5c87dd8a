"""Rope types in running engines: the same bits where a type promises them, others where it does not."""

from typing import Any

import numpy as np
import pytest

from tests.plugin import engine_process
from thor_spec.nano import shipped
from thor_spec.vllm_plugin import seam

NATIVE = 8192
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
    ropes = {"stock": None, **{kind: {"type": kind, "native": NATIVE, "factor": 2.0} for kind in KINDS}}
    return engine_process.run("rope_engines.py", ropes, tmp_path_factory.mktemp("engines") / "out.json")


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
