"""A needle in a haystack, by depth and length; it says something of a rope type only beside the ``default`` control."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from thor_spec.errors import ConfigError
from thor_spec.eval import haystack, wilson
from thor_spec.eval.run import Answers, Request
from thor_spec.eval.text import Tokenizer

CONTROL = "default"
MAX_TOKENS = 32
_TASK = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n{text}\nWhat is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """One question: the number ``answer`` was hidden at ``depth`` of a text of ``length`` tokens."""

    id: str
    length: int
    depth: float
    answer: str
    decoy: str
    """Another number, which is nowhere in the text."""
    prompt: tuple[int, ...]


def needles(
    tokenizer: Tokenizer, source: str, lengths: Sequence[int], depths: Sequence[float], samples: int, seed: int
) -> list[Needle]:
    """Return ``samples`` questions for each length and depth; prompt and answer together take at most the length.

    Raises: ConfigError, on depths outside 0..1 and lengths that do not hold the question.
    """
    if bad := [depth for depth in depths if not 0 <= depth <= 1]:
        raise ConfigError(f"--depth {bad[0]:g} is not in 0..1.")
    found = []
    for length in lengths:
        budget = length - MAX_TOKENS
        for sample in range(samples):
            # One text for all depths, so that they compare.
            straw = _straw(tokenizer, source, budget, f"{seed}:{length}:{sample}")
            for depth in depths:
                rng = random.Random(f"{seed}:{length}:{sample}:{depth}")
                key = haystack.word(rng)
                answer, decoy = map(str, rng.sample(range(1_000_000, 10_000_000), 2))
                text = _fitted(tokenizer, straw, budget, key, answer, depth)
                found.append(
                    Needle(
                        id=f"niah-{length}-{round(depth * 1000)}-{sample}",
                        length=length,
                        depth=depth,
                        answer=answer,
                        decoy=decoy,
                        prompt=tuple(tokenizer.encode(text).ids),
                    )
                )
    return found


def _straw(tokenizer: Tokenizer, source: str, budget: int, seed: str) -> list[str]:
    stream = haystack.sentences(source, random.Random(seed).randrange(1 << 30))
    straw: list[str] = []
    while tokenizer.count(" ".join(straw)) <= budget:
        straw += list(islice(stream, max(len(straw), 16)))
    return straw


def _fitted(tokenizer: Tokenizer, straw: Sequence[str], budget: int, key: str, answer: str, depth: float) -> str:
    needle = f"The special magic number for {key} is: {answer}."

    def build(count: int) -> str:
        return _TASK.format(text=haystack.hidden(straw[:count], [needle], [depth]), key=key)

    return haystack.fitted(build, tokenizer, budget, len(straw) // 2)


def requests(questions: Sequence[Needle], tokenizer: Tokenizer, *, choice: bool = False) -> list[Request]:
    """Return what the engine is asked: to answer, or for a ``choice`` how likely the number and the decoy are."""
    if not choice:
        return [Request(id=needle.id, tokens=needle.prompt, max_tokens=MAX_TOKENS) for needle in questions]
    return [
        Request(
            id=f"{needle.id}-{which}",
            tokens=(*needle.prompt, *tokenizer.encode(f" {number}.").ids),
            first=len(needle.prompt),
        )
        for needle in questions
        for which, number in (("answer", needle.answer), ("decoy", needle.decoy))
    ]


def instances(
    questions: Sequence[Needle], answers: Mapping[str, Answers], tokenizer: Tokenizer, *, choice: bool = False
) -> list[dict[str, Any]]:
    """Return every question with each arm's words and whether they hold the number.

    For a ``choice`` there are no words, but by how many nats the number is likelier than the decoy; found, if it is.
    """
    found = []
    for needle in questions:
        said: dict[str, Any]
        if choice:
            said = {arm: _preference(answer, needle.id) for arm, answer in answers.items()}
            hit = {arm: nats > 0 for arm, nats in said.items()}
        else:
            said = {arm: tokenizer.decode(answer.generated(needle.id)) for arm, answer in answers.items()}
            hit = {arm: needle.answer in words for arm, words in said.items()}
        found.append(
            {
                "id": needle.id,
                "length": needle.length,
                "depth": needle.depth,
                "prompt_tokens": len(needle.prompt),
                "answer": needle.answer,
                "decoy": needle.decoy,
                "said": said,
                "hit": hit,
            }
        )
    return found


def _preference(answers: Answers, name: str) -> float:
    right, wrong = (answers.logprobs(f"{name}-{which}").astype(float).sum() for which in ("answer", "decoy"))
    return float(right - wrong)


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return hits with Wilson's 95 % interval by arm, length and depth, and whether an arm differs from the control.

    Raises: ConfigError, without the control: a model may find needles beyond its native context with plain RoPE, too.
    """
    arms = sorted({arm for instance in found for arm in instance["hit"]})
    require_control(arms)
    if any(set(instance["hit"]) != set(arms) for instance in found):
        raise ConfigError("Not every needle was asked of every arm, so arms do not compare. Repeat the command.")
    cells: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for arm in arms:
        for length, depth in sorted({(instance["length"], instance["depth"]) for instance in found}):
            hits = [i["hit"][arm] for i in found if (i["length"], i["depth"]) == (length, depth)]
            cells[arm].append({"length": length, "depth": depth, **_counted(hits)})
    return {"control": CONTROL, "cells": cells, "by_length": {arm: _by_length(found, arm) for arm in arms}}


def _by_length(found: Sequence[Mapping[str, Any]], arm: str) -> list[dict[str, Any]]:
    rows = []
    for length in sorted({instance["length"] for instance in found}):
        of_it = [instance for instance in found if instance["length"] == length]
        row = {"length": length, **_counted([instance["hit"][arm] for instance in of_it])}
        if arm != CONTROL:
            gained = sum(i["hit"][arm] and not i["hit"][CONTROL] for i in of_it)
            lost = sum(i["hit"][CONTROL] and not i["hit"][arm] for i in of_it)
            row |= {"only_this": gained, "only_control": lost, "p": _sign_test(gained, lost)}
        rows.append(row)
    return rows


def _counted(hits: Sequence[bool]) -> dict[str, Any]:
    return {"hits": sum(hits), "n": len(hits), "wilson95": list(wilson.interval(sum(hits), len(hits)))}


def _sign_test(gained: int, lost: int) -> float:
    """Return the two-sided p of as uneven a split of the questions on which two arms differ (McNemar, exact)."""
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2.0**n
    return min(1.0, 2 * tail)


def require_control(arms: Sequence[str]) -> None:
    """Raise ConfigError, where ``default`` is not among the arms."""
    if CONTROL not in arms:
        raise ConfigError(
            f"Needles without the {CONTROL} rope as a control cannot be reported: a model may find them with plain "
            "RoPE, too. Run the control in the same evaluation."
        )
