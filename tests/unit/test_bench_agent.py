"""The benchmark of agents without a server: what it asks, what it refuses, and what it renders."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thor_spec.bench import agent, table, traces
from thor_spec.bench.agent import Repetition, Turn
from thor_spec.cli import starting
from thor_spec.cli.main import main
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import seam

MADE = {"sessions": 3, "turns": 4, "context": 4096, "tokens": 32}


def test_made_sessions_begin_alike_and_grow() -> None:
    sessions = traces.synthetic(**MADE, seed=1)
    assert sessions == traces.synthetic(**MADE, seed=1)
    assert sessions != traces.synthetic(**MADE, seed=2)
    assert len({json.dumps(session[0]) for session in sessions}) == 1
    assert len({json.dumps(session[1]) for session in sessions}) == 3
    for session in sessions:
        asked = list(traces.requests(session))
        assert [len(messages) for messages in asked] == [2, 4, 6, 8]
        assert all(later[: len(before)] == before for before, later in itertools.pairwise(asked))
        assert sum(len(json.dumps(message)) for message in asked[-1]) < 4096
        assert sum(len(json.dumps(message)) for message in asked[-1]) > 2048
        assert json.loads(asked[-1][2]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize(("changes", "says"), [({"turns": 1}, "at least 2"), ({"context": 512}, "do not fit")])
def test_sessions_that_cannot_be(changes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        traces.synthetic(**{**MADE, **changes}, seed=1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "cannot be read"),
        ('{"schema": 2, "sessions": [[]]}', "no trace of schema 1"),
        ('{"schema": 1, "sessions": [3]}', "session 0 must be a list"),
        ('{"schema": 1, "sessions": [[{"role": "user"}]]}', "session 0 has no assistant message"),
    ],
)
def test_a_trace_that_is_none(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ConfigError, match=says):
        traces.read(tmp_path / "t.json")


def repetition(seconds: float, hit_rate: float, *lengths: int, tau: float | None = None) -> Repetition:
    turns = [
        Turn(session=0, turn=i, prompt_tokens=n, ttft_s=seconds / (i + 1), seconds=seconds, tau=tau)
        for i, n in enumerate(lengths)
    ]
    return Repetition(seconds, hit_rate, tuple(turns))


def test_what_is_refused() -> None:
    caching = {"off": False, "both": True}
    good = {"off": [repetition(4, 0, 100, 200)], "both": [repetition(2, 0.5, 100, 200)]}
    assert not agent.refusals(good, caching=caching)
    assert "other lengths" in agent.refusals({**good, "both": [repetition(2, 0.5, 100)]}, caching=caching)[0]
    assert "reused nothing" in agent.refusals({**good, "both": [repetition(2, 0, 100, 200)]}, caching=caching)[0]
    assert "should cache nothing" in agent.refusals({**good, "off": [repetition(4, 0.1, 100, 200)]}, caching=caching)[0]


def test_summary_and_table() -> None:
    found = {
        "off": [repetition(4.0, 0, 100, 2000)] * 3,
        "both": [repetition(2.0, 0.5, 100, 2000, tau=2.5)] * 3,
    }
    summary = agent.summary(found)
    assert summary["both"]["times_faster"]["median"] == 2
    assert summary["both"]["ttft_s_by_turn"] == [2.0, 1.0]
    assert summary["both"]["tau_by_depth"] == {"64+": 2.5, "1024+": 2.5}
    assert summary["off"]["tau_by_depth"] == {}
    head, rows = table.agent(summary)
    assert {len(row) for row in rows} == {len(head)}
    assert rows[1][0] == "both"
    assert "50%" in rows[1]


def test_every_other_round_runs_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Source:
        def __init__(self, name: str) -> None:
            self.name = name

        def visit(self, look: Callable[[Any], Any]) -> None:
            order.append(self.name)
            look(None)

    monkeypatch.setattr(agent, "replay", lambda *_, **__: repetition(1, 0, 1))
    sources = {name: Source(name) for name in "ab"}
    found = agent.run(sources, [[]], at_once=1, tokens=1, repetitions=2, rounds=2, say=lambda _: None)
    assert order == ["a", "b", "b", "a"]
    assert {name: len(rows) for name, rows in found.items()} == {"a": 4, "b": 4}


def test_arms_over_made_up_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The pretended acceptance belongs to arms that draft, and to no other."""
    seen: dict[str, dict[str, Any]] = {}

    def planned(flags: dict[str, Any], _profile: Path | None, *, own: tuple[str, ...]) -> Any:
        name = f"{'cached' if '--enable-prefix-caching' in own else 'cold'} {flags['draft'] != 'none'}"
        seen[name] = flags
        return SimpleNamespace(plan=SimpleNamespace(context=4096))

    def stop(*_: Any, **__: Any) -> Any:
        raise ConfigError("far enough")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(starting, "planned", planned)
    monkeypatch.setattr(seam, "has_gpu_build", lambda: True)
    monkeypatch.setattr(agent, "run", stop)
    with pytest.raises(SystemExit):
        main(["bench", "agent", "--dummy", "small", "--synthetic-acceptance", "3"])
    assert list(seen) == ["cold False", "cached False", "cold True", "cached True"]
    for name, flags in seen.items():
        assert flags["dummy_weights"]
        assert flags["synthetic_acceptance"] == (3.0 if name.endswith("True") else None)


@pytest.mark.parametrize("given", [(), ("--enable-prefix-caching",)])
def test_only_users_are_warned_of_what_they_ask_for(capsys: pytest.CaptureFixture[str], given: tuple[str, ...]) -> None:
    made = starting.planned(
        {"model": "tiny-hybrid", "vllm_args": given}, own=("--enable-prefix-caching", "--max-logprobs", "-1")
    )
    assert "--enable-prefix-caching" in made.plan.argv
    assert ("prefix-cache-drafts" in capsys.readouterr().err) == bool(given)
