"""Long texts of an exact number of tokens, with things hidden at given depths."""

import random
import re
from collections.abc import Callable, Iterator, Sequence

from thor_spec.errors import ConfigError
from thor_spec.eval.corpus import texts
from thor_spec.eval.text import Tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_ADJECTIVES = (  # noqa: SIM905
    "amber brisk calm dusty eager faint gentle hollow icy jolly keen lofty mellow narrow odd pale quiet rapid "
    "shiny tidy upper vivid warm young zesty brave crisp dense early fresh grand humble ivory jagged kind lucid"
).split()
_NOUNS = (  # noqa: SIM905
    "anchor basket candle dragon engine feather garden hammer island jacket kettle ladder magnet needle orchard "
    "pencil quarry ribbon saddle teapot umbrella violin window yarn zipper beacon copper dagger easel falcon "
    "glacier harvest inkwell jungle lantern meadow nutmeg oyster pebble quilt rocket sparrow timber urchin valley "
    "willow acorn blanket cactus dolphin ember fountain goblet hazel insect jasmine kernel lemon marble"
).split()


def word(rng: random.Random) -> str:
    """Return a name such as ``amber-falcon``."""
    return f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}"


def words(rng: random.Random, count: int) -> list[str]:
    """Return different names. Raises: ConfigError, if there are not so many."""
    everything = [f"{adjective}-{noun}" for adjective in _ADJECTIVES for noun in _NOUNS]
    if count > len(everything):
        raise ConfigError(f"{count} different names are wanted, and there are {len(everything)}.")
    return rng.sample(everything, count)


def sentences(source: str, seed: int) -> Iterator[str]:
    """Yield the sentences of a corpus, from the start again when it ends. Raises: ConfigError, if it has none."""
    found = True
    while found:
        found = False
        for text in texts(source, seed):
            for part in re.split(r"(?<=[.!?])\s+", text.strip()):
                if part:
                    found = True
                    yield part
    raise ConfigError(f"The corpus {source} has no text to hide needles in. Name another with --corpus.")


def fitted(build: Callable[[int], str], tokenizer: Tokenizer, budget: int, guess: int) -> str:
    """Return the longest ``build(n)`` that has at most ``budget`` tokens; more ``n`` must not mean fewer.

    Args:
        build: may stop growing at some ``n``.
        guess: a likely ``n``.

    Raises: ConfigError, if not even ``build(0)`` fits.
    """
    low, high, best = 0, max(guess, 1), build(0)
    if tokenizer.count(best) > budget:
        raise ConfigError(f"{budget} tokens are too few for this task. Raise --length.")
    while tokenizer.count(text := build(high)) <= budget:
        if text == best:
            return best
        low, high, best = high, high * 2, text
    while high - low > 1:
        middle = (low + high) // 2
        if tokenizer.count(text := build(middle)) <= budget:
            low, best = middle, text
        else:
            high = middle
    return best


def hidden(straw: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> str:
    """Return the sentences of ``straw`` with each needle at its depth, a share of the text from its start."""
    places = sorted(zip((round(depth * len(straw)) for depth in depths), needles, strict=True), key=lambda p: p[0])
    parts: list[str] = []
    done = 0
    for place, needle in places:
        parts += [*straw[done:place], needle]
        done = place
    return " ".join([*parts, *straw[done:]])
