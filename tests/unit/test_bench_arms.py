"""Arms of a comparison: how they are described, which cannot be, and where they differ without saying so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench_outcomes import SHARED
from thor_spec.bench.arms import Arm, parse, undeclared
from thor_spec.bench.facts import of_plan
from thor_spec.config import resolve
from thor_spec.errors import ConfigError
from thor_spec.serve.plan import make_plan


def test_arms_are_named_on_the_command_line() -> None:
    exact, typical = parse(["exact", "t:accept=typical,accept-eps=0.2,batch=8"], SHARED)
    assert (exact.name, exact.batch, exact.request) == ("exact", 2, {"temperature": 0.7})
    assert typical.batch == 8
    assert typical.request == {"temperature": 0.7, "thor_spec": {"accept": "typical", "accept_eps": 0.2}}
    assert exact.server == typical.server == "{}"
    assert [arm.name for arm in parse([], SHARED)] == ["default"]


def test_arms_take_what_profiles_take(tmp_path: Path) -> None:
    """Sizes, paths, lists and what YAML thinks a truth or a number; and arms that differ in them have two servers."""
    path = tmp_path / "arms.yaml"
    path.write_text(
        "a: {kv_cache_memory: 2GiB, tree: 15, vllm_args: [--seed, 3], environment: {OMP_NUM_THREADS: 1}}\n"
        "b: {rope_factors: f.json, tree: off}\n"
    )
    a, b = parse([str(path)], SHARED)
    path.with_name("off.yaml").write_text("off: {draft: none}\n7:\n")
    assert [arm.name for arm in parse([str(path.with_name("off.yaml"))], SHARED)] == ["off", "7"]
    line = parse(["a:kv_cache_memory=2GiB,tree=15", "b:tree=off"], SHARED)
    for arm in (a, line[0]):
        assert resolve({k: v for k, v in arm.declared.items()}).config.kv_cache_memory == 2 << 30
        assert arm.declared["tree"] == "15"
    assert (b.declared["tree"], line[1].declared["tree"], b.declared["rope_factors"]) == ("off", "off", Path("f.json"))
    assert (a.declared["vllm_args"], a.declared["environment"]) == (("--seed", "3"), {"OMP_NUM_THREADS": "1"})
    assert a.server != b.server
    with pytest.raises(ConfigError, match=r"Arm a: draft_tokens must be int, not str\."):
        parse(["a:draft_tokens=many"], SHARED)


def test_arms_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "arms.yaml"
    path.write_text("shared: {draft_tokens: 3}\nplain: {draft: none, draft_tokens: null}\nspec:\n")
    plain, spec = parse([str(path)], SHARED)
    assert (plain.drafts, spec.drafts) == (False, True)
    assert plain.server != spec.server
    assert spec.options["draft_tokens"] == 3


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (["a:nonsense=1"], "there is no option nonsense"),
        (["a:accept"], "not KEY=VALUE"),
        (["a", "a"], "two arms a"),
        (["a:batch=0"], "at least 1"),
        (["a:accept=loose"], "not one of exact"),
        (["missing.yaml"], "cannot be read"),
        (["a:port=1"], "there is no option port"),
    ],
)
def test_arms_that_cannot_be_are_refused(described: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(described, SHARED)


def test_undeclared_differences_are_found_between_arms_and_between_starts() -> None:
    arms = [Arm(name="a", declared={}, shared={}), Arm(name="b", declared={"draft": "none"}, shared={})]
    base = {"drafter": "1", "draft_tokens": 7, "code": "x", "vllm": "0.33"}
    other = {**base, "drafter": None, "draft_tokens": 0}
    assert undeclared(arms, {"a": [base, base], "b": [other]}) == []
    assert "b and a differ in vllm" in undeclared(arms, {"a": [base], "b": [{**other, "vllm": "0.32"}]})[0]
    assert "a changed code between" in undeclared(arms, {"a": [base, {**base, "code": "y"}], "b": [other]})[0]
    # Declared by one of them is declared; a fact that only one has is a difference.
    assert "differ in extra" in undeclared(arms, {"a": [base], "b": [{**other, "extra": 1}]})[0]


DECLARED: dict[str, Any] = {
    "model": "nano-llada",
    "draft": "none",
    "draft_tokens": 3,
    "max_request_bytes": 1 << 20,
    "context": 4096,
    "max_seqs": 4,
    "kv_cache_memory": 1 << 28,
    "state": "snapshot",
    "gdn_kernel": "replay",
    "drafter_window": 64,
    "rope": "yarn",
    "rope_factor": 2.0,
    "adaptive_drafts": True,
    "tree": "8",
    "acceptance_floor": 1.5,
    "memory_floor": 1 << 30,
    "environment": {"OMP_NUM_THREADS": "1"},
    "vllm_args": ("--enable-prefix-caching",),
}


@pytest.mark.parametrize("option", DECLARED)
def test_a_declared_option_explains_what_the_engine_is_asked_for(option: str) -> None:
    """Otherwise a comparison of two settings runs to its end, and is then not reported."""
    shared = {"model": "nano-hybrid", **({"rope": "linear", "rope_factor": 4.0} if option == "rope_factor" else {})}
    arms = [
        Arm(name="a", declared={}, shared=shared),
        Arm(name="b", declared={option: DECLARED[option]}, shared=shared),
    ]
    seen = {arm.name: [of_plan(make_plan(resolve(arm.options)))] for arm in arms}
    assert undeclared(arms, seen) == []
    assert undeclared([arms[0], replace(arms[1], declared={})], seen) or option in {"memory_floor", "acceptance_floor"}
