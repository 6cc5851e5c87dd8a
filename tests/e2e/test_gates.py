"""Gates and benchmarks over a running server: green where it is honest, red where corruption is planted."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served
from tests.e2e.test_lossless import thor_spec
from thor_spec.config import CONTROLS
from thor_spec.errors import ConfigError
from thor_spec.gates import controls
from thor_spec.gates.distribution import Distribution
from thor_spec.gates.gate import Gate, Options
from thor_spec.gates.lossless import Lossless
from thor_spec.serve.client import Server

GREEDY = [kind for kind in CONTROLS if kind not in controls._SAMPLED]


@pytest.fixture(scope="module")
def server(hybrid: Served) -> Any:
    with Server(hybrid.url) as found:
        yield found


def verdict(gate: Gate, server: Server, **options: Any) -> Any:
    asked = Options(**options)
    return gate.verdict(gate.candidate(server, asked), asked)


@pytest.mark.parametrize("kind", ["", *GREEDY])
def test_the_greedy_gate_sees_each_corruption(server: Server, kind: str) -> None:
    assert set(GREEDY) <= set(controls.applicable(server))
    found = verdict(Lossless(), server, count=4, tokens=48, control=kind)
    assert found.passed == (not kind), found.as_text()
    assert found.figures["accepted_drafts"] > 0


@pytest.mark.parametrize("kind", ["", "sharpened", "blind-draft"])
def test_the_sampling_gate_sees_a_wrong_law(server: Server, kind: str) -> None:
    """A relaxed rule as well; on a CPU that takes a minute and a half, and `verify controls` shows it."""
    found = verdict(Distribution(), server, seeds=2, control=kind)
    assert found.passed == (not kind), found.as_text()


def test_a_corrupted_answer_leaves_the_next_one_alone(server: Server) -> None:
    honest = server.complete("The river bends", max_tokens=32).tokens
    for kind in GREEDY:
        assert server.complete("The river bends", max_tokens=32, thor_spec={"control": kind}).tokens
        assert server.complete("The river bends", max_tokens=32).tokens == honest, kind


def test_red_exits_1_with_a_record(hybrid: Served, tmp_path: Path) -> None:
    args = ("--url", hybrid.url, "--control", "blind-draft", "--prompts", "2", "--tokens", "16")
    code, printed, errors = thor_spec("verify", "lossless", *args, "--out", str(tmp_path / "r"), runtime=tmp_path)
    assert code == 1
    assert "lossless is red" in errors
    assert not printed["passed"]
    assert not json.loads((tmp_path / "r" / "record.json").read_text())["passed"]


def test_nobody_is_corrupted_who_did_not_allow_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": server.model, "prompt": "x", "max_tokens": 1, "thor_spec": {"control": "nonsense"}},
        timeout=60,
    )
    assert answer.status_code == 400
    monkeypatch.setattr(controls, "CONTROLS", {"nonsense": ""})
    with pytest.raises(ConfigError, match="Start it with `thor-spec serve --allow-controls`"):
        controls.require_allowed(server)


def test_bench_chat_compares_two_rules(hybrid: Served, tmp_path: Path) -> None:
    args = ("--url", hybrid.url, "--temperature", "1", "--tokens", "8", "--kinds", "chat", "--batch", "2")
    arms = ("--arms", "exact", "--arms", "loose:accept=threshold,accept_eps=0.01")
    code, printed, errors = thor_spec(
        "bench", "chat", *args, *arms, "--out", str(tmp_path / "r"), runtime=tmp_path / "locks"
    )
    assert code == 0, errors
    summary = printed["summary"]
    assert summary["loose"]["tau"]["median"] > summary["exact"]["tau"]["median"] > 1
    assert summary["loose"]["tau"]["ratio"]["low95"] > 1
    assert summary["exact"]["relaxed_share"]["median"] == 0
    places = summary["loose"]["accepted_by_place"]
    assert len(places) == 7
    assert 1 >= places[0] >= places[-1] >= 0
    assert printed["gates"]["exact"]["passed"]
    record = json.loads((tmp_path / "r" / "record.json").read_text())
    assert {name: len(found) for name, found in record["samples"].items()} == {"exact": 5, "loose": 5}
    assert all(answer["tokens"] == 8 for found in record["samples"]["exact"] for answer in found["answers"])


def test_bench_serving_runs_vllms_load_generator(hybrid: Served, tmp_path: Path) -> None:
    args = ("--url", hybrid.url, "--concurrency", "2", "--input-tokens", "16", "--output-tokens", "4", "--prompts", "3")
    code, printed, errors = thor_spec(
        "bench", "serving", *args, "--out", str(tmp_path / "r"), runtime=tmp_path / "locks"
    )
    assert code == 0, errors
    (point,) = printed["points"]
    assert (point["concurrency"], point["result"]["completed"], point["result"]["failed"]) == (2, 3, 0)
    assert point["result"]["total_output_tokens"] == 12
    assert point["result"]["output_throughput"] > 0
