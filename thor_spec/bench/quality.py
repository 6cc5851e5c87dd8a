"""What a rule costs: functions that pass their doctest, how likely the target finds the text, how varied it is."""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from thor_spec.bench.doctests import grade
from thor_spec.errors import ConfigError
from thor_spec.serve.client import Answer, Server

SEEDS = 4
TOKENS = 96
GRAMS = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Over the answers of one arm."""

    answers: int
    parses: float
    """Share of functions that parse with a body of their own."""
    passes: float
    """Share that pass their doctest."""
    perplexity: float
    """Of the answers under the target at temperature 1; low is likely, also for text that repeats itself."""
    distinct: tuple[float, ...]
    """Share of different 1-, 2- and 3-grams of tokens, within each answer, averaged."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-ready."""
        return asdict(self)


@functools.cache
def tasks() -> tuple[Mapping[str, str], ...]:
    """Return the tasks: name and head (signature, docstring and doctest)."""
    return tuple(json.loads(resources.files(__package__).joinpath("tasks.json").read_text(encoding="utf-8")))


def measure(server: Server, said: Mapping[str, Any], *, seeds: int = SEEDS, at_once: int = 4) -> Quality:
    """Let the server write every function, with several seeds, and judge what it wrote."""
    asked = [(task, seed) for task in tasks() for seed in range(seeds)]
    answers = server.drawn_all(
        [(task["head"], seed) for task, seed in asked], at_once=at_once, max_tokens=TOKENS, **said
    )
    grades = [grade(task["name"], task["head"], a.text) for (task, _), a in zip(asked, answers, strict=True)]
    return Quality(
        answers=len(answers),
        parses=sum(g.parses for g in grades) / len(grades),
        passes=sum(g.passes for g in grades) / len(grades),
        perplexity=perplexity(server, answers, at_once=at_once),
        distinct=tuple(distinct([answer.tokens for answer in answers], n) for n in GRAMS),
    )


def perplexity(server: Server, answers: Sequence[Answer], *, at_once: int = 1) -> float:
    """Return ``exp`` of the mean negative log-probability of the answers' tokens, which the target itself states.

    Raises: ConfigError, if the server was told to give logits instead.
    """
    steps = [step for forced in server.forced_all(answers, at_once=at_once) for step in forced]
    if any(step.logprob > 0 for step in steps):
        raise ConfigError(
            f"{server.url} tells logits where log-probabilities belong, so there is no perplexity. Start it without "
            "--logprobs-mode."
        )
    return math.exp(-sum(step.logprob for step in steps) / len(steps))


def distinct(answers: Sequence[Sequence[int]], n: int) -> float:
    """Return the share of different n-grams within an answer, averaged over answers."""
    shares = []
    for tokens in answers:
        grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
        if grams:
            shares.append(len(set(grams)) / len(grams))
    return sum(shares) / len(shares) if shares else 0.0
