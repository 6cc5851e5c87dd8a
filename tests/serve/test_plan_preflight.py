"""What is known not to work, and what is likely to fail."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoints import HYBRID, MakeCheckpoint
from thor_spec.config import resolve
from thor_spec.errors import PlatformError
from thor_spec.serve import plan as planning
from thor_spec.serve import preflight
from thor_spec.serve.checkpoint import open_checkpoint
from thor_spec.serve.plan import Plan, make_plan
from thor_spec.vllm_plugin import compat

from .conftest import Make


def test_a_plugin_that_is_not_installed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "PLUGIN_GROUP", "no.such.group")
    with pytest.raises(PlatformError, match="not registered"):
        make()


def test_a_combination_that_is_known_not_to_work_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "version", lambda: "0.28.1")
    with pytest.raises(PlatformError, match=r"prefix-cache-0.28: corrupt answers.*issues/53912.*Leave --enable"):
        make(vllm_args=("--enable-prefix-caching",))
    make()  # without it nothing is known against it


def test_a_method_of_vllm_s_own_is_judged_too(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(method: str) -> Plan:
        passed = ("--speculative-config", json.dumps({"method": method, "num_speculative_tokens": 3}))
        return make_plan(resolve({"model": str(target), "draft": "none", "vllm_args": passed}))

    with pytest.raises(PlatformError, match="ngram-hybrid: the recurrent state is corrupted"):
        plan("ngram")
    plan("mtp")
    monkeypatch.setattr(preflight.board, "detect", lambda *_: SimpleNamespace(kind="thor"))
    with pytest.raises(PlatformError, match="gdn-mtp-decode"):
        plan("mtp")
    monkeypatch.setenv("VLLM_GDN_DECODE_KERNEL", "triton")
    plan("mtp")


def test_what_is_likely_to_fail_is_told(target: Path, drafter: Path) -> None:
    told: list[str] = []
    flags = {"model": str(target), "draft": str(drafter), "vllm_args": ("--enable-prefix-caching",)}
    make_plan(resolve(flags), note=told.append)
    assert len(told) == 1
    assert told[0].startswith("warning: prefix-cache-drafts: an open report")


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        (None, "none"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "nvfp4",
        ),
        ({"quant_method": "awq", "bits": 4}, "awq"),
    ],
)
def test_facts_of_a_start(make_checkpoint: MakeCheckpoint, quantization: dict[str, Any] | None, name: str) -> None:
    target = open_checkpoint("t", make_checkpoint("q", HYBRID, quantization_config=quantization))
    passed = ("--kv-cache-dtype", "fp8_e4m3", "--enforce-eager", "--moe-backend=marlin")
    found = preflight.facts(target, drafter=True, context=9, vllm="0.33.0", passed=passed, variables={})
    assert found["weights"] == name
    assert (found["kv_dtype"], found["graphs"], found["moe_backend"], found["hybrid"]) == ("fp8", False, True, True)
