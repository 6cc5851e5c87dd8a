"""What the prefix-cache gate asks: conversations whose requests share beginnings, all from one seed.

A conversation is played twice, first with nothing shared and then from the cache. Its later requests hold earlier
answers, so it is a function from answers to the next request.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["repeat", "partial", "branch", "turns"]
Prompt = tuple[int, ...]
ANSWER = 24  # tokens; several verify steps


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests with a common history. ``next`` takes the answers so far, and returns None at the end."""

    kind: Kind
    next: Callable[[Sequence[Sequence[int]]], Prompt | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Lengths in tokens."""

    block: int
    """Between two places where a request can go on."""
    longest: int
    """Request, with room for its answer."""


class Text:
    """Tokens of a text that the server's own tokenizer cut, at random places."""

    def __init__(self, tokens: Sequence[int], seed: int) -> None:
        self._tokens = tuple(tokens)
        self.rng = random.Random(seed)

    def take(self, count: int) -> Prompt:
        """Return ``count`` tokens from a random place; no two texts begin alike."""
        start = self.rng.randrange(len(self._tokens))
        round_ = self._tokens[start:] + self._tokens[:start]
        return (round_ * (count // len(round_) + 1))[:count]


def make(text: Text, size: Size, count: int) -> Iterator[Conversation]:
    """Yield ``count`` conversations, of all kinds in turn; every tenth is a long agent's."""
    rng = text.rng
    for number in range(count):
        if number % 10 == 9:
            yield turns(text, size, 12)
        elif number % 4 == 0:
            length = _near(rng, size, rng.randint(1, 3))
            yield _fixed("repeat", [text.take(length)] * 2)
        elif number % 4 == 1:
            head = text.take(_near(rng, size, rng.randint(1, 2)))
            tails = [text.take(rng.randint(1, size.block)) for _ in range(3)]
            yield _fixed("partial", [_cut(head + tail, size) for tail in tails])
        elif number % 4 == 2:
            yield _branch(text, size)
        else:
            yield turns(text, size, 4)


def turns(text: Text, size: Size, count: int) -> Conversation:
    """Return an agent's trace: a system prompt of some blocks, then answers and results of tools, as far as fits."""
    first = text.take(min(_near(text.rng, size, 2), size.longest // 2))
    step = max(1, (size.longest - len(first)) // count - ANSWER)
    results = [text.take(text.rng.randint(max(1, step // 2), step)) for _ in range(count - 1)]

    def following(answers: Sequence[Sequence[int]]) -> Prompt | None:
        if len(answers) >= count:
            return None
        whole = first
        for answer, result in zip(answers, results, strict=False):
            whole = (*whole, *answer, *result)
        return whole if len(whole) <= size.longest else None

    return Conversation("turns", following)


def _branch(text: Text, size: Size) -> Conversation:
    history = text.take(_near(text.rng, size, 1))
    ends = [text.take(text.rng.randint(1, size.block)) for _ in range(2)]

    def following(answers: Sequence[Sequence[int]]) -> Prompt | None:
        if not answers:
            return history
        if len(answers) > len(ends):
            return None
        return _cut((*history, *answers[0], *ends[len(answers) - 1]), size)

    return Conversation("branch", following)


def _fixed(kind: Kind, prompts: Sequence[Prompt]) -> Conversation:
    return Conversation(kind, lambda answers: prompts[len(answers)] if len(answers) < len(prompts) else None)


def _near(rng: random.Random, size: Size, blocks: int) -> int:
    """Return a length about so many blocks: on a boundary, beside it, or anywhere behind it."""
    off = rng.choice([0, 1, -1, rng.randint(1, size.block - 1)])
    return max(2, min(blocks * size.block + off, size.longest))


def _cut(prompt: Sequence[int], size: Size) -> Prompt:
    return tuple(prompt[: size.longest])


def reusable(prompts: Sequence[Prompt], number: int, block: int) -> int:
    """Return how many tokens of a request the ones before it must have left in the cache.

    A request leaves the state at the last boundary before its last token; a later one with the same tokens up to there
    can go on from it.
    """
    asked = prompts[number]
    found = 0
    for before in prompts[:number]:
        boundary = (len(before) - 1) // block * block
        if boundary <= (len(asked) - 1) // block * block and asked[:boundary] == before[:boundary]:
            found = max(found, boundary)
    return found
