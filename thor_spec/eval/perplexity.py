"""Perplexity by distance: how well text is predicted within the native context, and how well beyond it."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thor_spec.errors import ConfigError
from thor_spec.eval.corpus import texts
from thor_spec.eval.run import Request
from thor_spec.eval.text import Tokenizer

BLOCK = 4096
"""Tokens that are drawn together in the bootstrap: neighbours are not independent."""
LEAST_BLOCKS = 8
"""Fewer drawn with replacement look much surer than they are; there is no interval then."""
DRAWS = 2000
MOST = 0.9  # of the characters that missing tokens would take; more documents than needed would be lost
CONTROL = "default"


def sequences(
    source: str, tokenizer: Tokenizer, length: int, samples: int, seed: int
) -> Iterator[tuple[str, list[int]]]:
    """Yield ``samples`` texts with their tokens, ``length`` each; short documents of a corpus are joined.

    Raises: ConfigError, if the corpus is too short.
    """
    documents = texts(source, seed)
    for sample in range(samples):
        text, encoded = "", tokenizer.encode("")
        while (missing := length - len(encoded.ids)) > 0:
            # Most of what is missing at once: encoding is as long as the text, and documents may be many.
            wanted = len(text) + MOST * missing * len(text) / max(1, len(encoded.ids))
            try:
                text += next(documents) + "\n"
                while len(text) < wanted:
                    text += next(documents) + "\n"
            except StopIteration as error:
                raise ConfigError(
                    f"{source} has not enough text for {samples} x {length} tokens: it ends in sample {sample + 1}. "
                    "Lower --length or --samples, or name more text."
                ) from error
            encoded = tokenizer.encode(text)
        yield text[: encoded.spans[length - 1][1]], encoded.ids[:length]


def requests(source: str, tokenizer: Tokenizer, lengths: Sequence[int], samples: int, seed: int) -> list[Request]:
    """Return one request for each text; texts of each length begin alike, so that lengths compare.

    The last token of each length is the engine's to write, so ``length - 1`` are given.
    """
    longest = [ids for _, ids in sequences(source, tokenizer, max(lengths), samples, seed)]
    return [
        Request(id=f"ppl-{length}-{sample}", tokens=ids[: length - 1])
        for length in lengths
        for sample, ids in enumerate(longest)
    ]


def edges(native: int, length: int) -> list[int]:
    """Return where the bands of a text begin and end: halves below the native context, doublings beyond it."""
    marks = [0, native // 4, native // 2]
    while native < length:
        marks.append(native)
        native *= 2
    return [mark for mark in marks if mark < length] + [length]


def bands(rows: Sequence[NDArray[np.float32]], native: int) -> list[dict[str, Any]]:
    """Return the perplexity of each band of positions over texts of one length.

    Args:
        rows: for each text, the log-probabilities of its positions 1, 2, …, in nats.
    """
    length = len(rows[0]) + 1
    found = []
    marks = edges(native, length)
    for start, stop in itertools.pairwise(marks):
        values = np.concatenate([row[max(start, 1) - 1 : stop - 1] for row in rows]).astype(np.float64)
        if len(values):
            found.append({"start": start, "stop": stop, "tokens": len(values), "ppl": math.exp(-values.mean())})
    return found


def far(
    rows: Sequence[NDArray[np.float32]], control: Sequence[NDArray[np.float32]] | None, native: int, seed: int = 0
) -> dict[str, Any] | None:
    """Return the perplexity of positions from ``native`` on with a 95 % interval; None where there are none.

    The intervals are None where there are too few blocks for one.

    With a ``control``, also the ratio of the perplexities on the same tokens, drawn in pairs of blocks.
    """
    tails = [row[native - 1 :].astype(np.float64) for row in rows]
    blocks = [tail[i : i + BLOCK] for tail in tails for i in range(0, len(tail), BLOCK)]
    if not blocks:
        return None
    sums, counts = np.array([block.sum() for block in blocks]), np.array([len(block) for block in blocks])
    drawn = np.random.default_rng(seed).integers(len(blocks), size=(DRAWS, len(blocks)))
    totals = counts[drawn].sum(axis=1)
    found: dict[str, Any] = {
        "tokens": int(counts.sum()),
        "blocks": len(blocks),
        "ppl": math.exp(-sums.sum() / counts.sum()),
        "ppl95": _between(np.exp(-sums[drawn].sum(axis=1) / totals), len(blocks)),
    }
    if control is not None:
        others = [row[native - 1 :].astype(np.float64) for row in control]
        theirs = np.array([tail[i : i + BLOCK].sum() for tail in others for i in range(0, len(tail), BLOCK)])
        gains = theirs - sums
        found["ratio"] = math.exp(gains.sum() / counts.sum())
        found["ratio95"] = _between(np.exp(gains[drawn].sum(axis=1) / totals), len(blocks))
    return found


def _between(values: NDArray[np.float64], blocks: int) -> list[float] | None:
    if blocks < LEAST_BLOCKS:
        return None
    return [float(value) for value in np.percentile(values, [2.5, 97.5])]


def summary(
    rows: Mapping[str, Mapping[int, Sequence[NDArray[np.float32]]]], native: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return bands and far perplexity by arm and length.

    Args:
        rows: by arm and length, each text's log-probabilities; arms saw the same tokens.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for arm, lengths in rows.items():
        found[arm] = {}
        for length, texts_of_it in lengths.items():
            control = rows[CONTROL][length] if arm != CONTROL and CONTROL in rows else None
            found[arm][str(length)] = {
                "bands": bands(texts_of_it, native),
                "far": far(texts_of_it, control, native),
            }
    return found
