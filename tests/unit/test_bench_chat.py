"""Comparisons of arms without a server: what they summarize, and what they refuse."""

from typing import Any

import pytest

from tests.unit.bench_outcomes import RED, SHARED, outcome, repetition, timed
from thor_spec.bench import chat, table
from thor_spec.bench.arms import Arm, parse
from thor_spec.bench.load import by_length
from thor_spec.bench.turns import turns
from thor_spec.cli.main import main
from thor_spec.errors import ConfigError


def test_a_comparison_gives_medians_intervals_and_paired_ratios() -> None:
    found = outcome()
    assert found.refusals == []
    summary = found.as_dict()["summary"]
    assert summary["exact"]["tok_s"]["median"] == pytest.approx(100 / 1.2)
    assert summary["loose"]["tok_s"]["ratio"]["median"] == pytest.approx(1.5)
    assert summary["loose"]["tok_s"]["ratio"]["low95"] == pytest.approx(1.5)
    assert summary["exact"]["tau"]["median"] == 2.5
    # Of its own count: vLLM's leaves out drafts behind an answer's last token, and the share would pass one.
    assert summary["exact"]["relaxed_share"]["median"] == 0.25
    assert summary["exact"]["accepted_by_place"] == [0.9, 0.6]
    assert summary["exact"]["joules_per_token"] is None
    assert summary["loose"]["joules_per_token"]["median"] == 0.5


def test_steps_are_told_by_the_tokens_that_they_draft() -> None:
    metrics = """# TYPE thor_spec:draft_length_steps counter
thor_spec:draft_length_steps_total{draft_tokens="15",depth="0+"} 20
thor_spec:draft_length_steps_total{draft_tokens="15",depth="1024+"} 10
thor_spec:draft_length_steps_total{draft_tokens="0",depth="0+"} 10
# TYPE thor_spec:draft_length_tokens counter
thor_spec:draft_length_tokens_total{draft_tokens="15",depth="0+"} 60
thor_spec:draft_length_tokens_total{draft_tokens="15",depth="1024+"} 15
thor_spec:draft_length_tokens_total{draft_tokens="0",depth="0+"} 10
# TYPE thor_spec:draft_length_seconds counter
thor_spec:draft_length_seconds_total{draft_tokens="15",depth="0+"} 0.06
thor_spec:draft_length_seconds_total{draft_tokens="15",depth="1024+"} 0.03
thor_spec:draft_length_seconds_total{draft_tokens="0",depth="0+"} 0.02
"""
    found = by_length(metrics)
    assert found[15] == {"steps": 30, "tokens": 75, "seconds": pytest.approx(0.09)}
    told = outcome()
    told.repetitions["loose"] = [repetition(by_length=found) for _ in range(5)]
    summary = told.summary()
    assert summary["exact"]["by_length"] == {}
    assert summary["loose"]["by_length"][0] == {"share": 0.25, "tokens": 1, "ms": pytest.approx(2)}
    head, rows = table.chat(summary)
    told_of = [row[head.index("steps by drafts")] for row in rows]
    assert told_of == ["-", "0: 25%, 1.00 tokens in 2.00 ms; 15: 75%, 2.50 tokens in 3.00 ms"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gates": {"exact": RED}}, "lossless gate of exact is red: 3 wrong"),
        ({"facts": {"exact": [{"vllm": "1"}], "loose": [{"vllm": "2"}]}}, "differ in vllm"),
    ],
)
def test_nothing_is_reported_when_there_is_a_reason(changes: dict[str, Any], why: str) -> None:
    content = outcome(**changes).as_dict()
    assert why in content["refused"][0]
    assert content["summary"] is None
    assert content["samples"]["exact"]  # kept, for whoever looks into it


def test_throttling_wrong_labels_and_other_prompts_are_reasons() -> None:
    made = outcome()
    made.repetitions["exact"][2] = repetition(throttling="the GPU's throttle alert was on")
    assert "throttled during exact" in made.refusals[0]
    made = outcome()
    made.repetitions["loose"][0] = repetition()
    assert "asked for threshold eps=0.2, and the server says exact, threshold" in made.refusals[0]
    made = outcome()
    made.repetitions["exact"][0] = repetition(answers=(timed(prompt_tokens=6), timed()))
    assert "not of the same length" in made.refusals[0]


def test_too_few_repetitions_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 5"):
        chat.run(parse([], SHARED), lambda arm: pytest.fail("started"), chat.Options(repetitions=4))


@pytest.mark.parametrize("kinds", ["foo", "code,foo", "code,", ""])
def test_kinds_that_there_are_none_of_start_nothing(monkeypatch: pytest.MonkeyPatch, kinds: str) -> None:
    monkeypatch.setattr("thor_spec.bench.chat.run", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chat", "--kinds", kinds])
    assert ended.value.code == 2


def test_arms_take_turns_and_servers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Place:
        def __init__(self, arm: Arm) -> None:
            self.arm = arm

        def visit(self, look: Any) -> Any:
            order.append(f"start {self.arm.name}")
            return look(self)

        context = 2048

    monkeypatch.setattr(chat.facts, "of_server", lambda server, plan: {})
    monkeypatch.setattr(chat, "repeat", lambda server, requests, batch, said: order.append(f"{batch}") or repetition())
    monkeypatch.setattr(chat.Lossless, "candidate", lambda self, server, options: None)
    monkeypatch.setattr(chat.Lossless, "verdict", lambda self, state, options: RED)
    arms = parse(["a:batch=1", "b:batch=2", "c:batch=3,draft=none"], {"temperature": 0})
    found = chat.run(arms, lambda arm: Place(arm), chat.Options(repetitions=5, per_start=2))  # type: ignore[arg-type,return-value]
    assert {name: len(each) for name, each in found.repetitions.items()} == {"a": 5, "b": 5, "c": 5}
    # Warm-ups 1 2 and 3, then two repetitions, the second backwards; the next round starts with the other server.
    assert " ".join(order[:15]) == "start a 1 2 1 2 2 1 start c 3 3 3 start c 3 3 3"
    assert set(found.gates) == {"a", "b"}
    random = chat.Options(repetitions=5, judged=False)
    one = chat.run(arms[:2], lambda arm: Place(arm), random)  # type: ignore[arg-type,return-value]
    assert len(one.facts["a"]) == 1
    assert not one.gates


def test_sides_take_turns_backwards_every_other_time() -> None:
    assert list(turns(("a", "b"), 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert [side for _, side in turns({"a": 1, "b": 2}, 2)] == ["a", "b", "b", "a"]
