"""Outcomes of benchmarks, made up, and their records."""

from pathlib import Path
from typing import Any

from thor_spec import record
from thor_spec.bench import chat
from thor_spec.bench.arms import parse
from thor_spec.bench.load import Repetition, Timed
from thor_spec.gates.verdict import Verdict

SHARED = {"temperature": 0.7, "batch": 2}


def timed(**changes: Any) -> Timed:
    values = {"kind": "code", "tokens": 10, "prompt_tokens": 5, "ttft_s": 0.1, "tpot_s": 0.01, "rule": "exact"}
    return Timed(**{**values, **changes})


def repetition(seconds: float = 1.0, **changes: Any) -> Repetition:
    values: dict[str, Any] = {
        "seconds": seconds,
        "tokens": 100,
        "answers": (timed(), timed(ttft_s=0.3)),
        "drafts": 20.0,
        "accepted": 30.0,
        "accepted_by_place": (18.0, 12.0),
        "taken": 32.0,
        "relaxed": 8.0,
        "by_length": {},
        "joules": None,
        "degrees": None,
        "throttling": None,
    }
    return Repetition(**{**values, **changes})


def outcome(**changes: Any) -> chat.Outcome:
    arms = parse(["exact", "loose:accept=threshold,accept_eps=0.2"], SHARED)
    loose = (timed(rule="threshold eps=0.2"), timed(rule="threshold eps=0.2"))
    samples = {
        "exact": [repetition(1.0 + i / 10) for i in range(5)],
        "loose": [repetition((1.0 + i / 10) / 1.5, answers=loose, joules=50.0) for i in range(5)],
    }
    green = Verdict(gate="lossless", passed=True, summary="fine")
    facts = {"exact": [{"vllm": "1"}], "loose": [{"vllm": "1"}]}
    made = chat.Outcome(arms, samples, facts, {"exact": green, "loose": green}, {})
    for name, value in changes.items():
        setattr(made, name, value)
    return made


RED = Verdict(gate="lossless", passed=False, summary="3 wrong")


def written(folder: Path, name: str, content: dict[str, Any]) -> None:
    record.write(name, content, folder=folder / name)
