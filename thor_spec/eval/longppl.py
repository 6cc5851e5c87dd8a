"""LongPPL (arXiv:2410.23771): perplexity of the tokens that an evaluator can know from the far past alone.

The published package computes it with transformers models, whole logits at once; here the log-probabilities come from
the engine. Rule, windows and the mapping by characters are the package's, which the tests compare with.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thor_spec.eval.run import Answers, Request

SHORT = 4096
"""Tokens of context that the short reading has at least."""
WINDOW = 1024
"""Tokens that share one short context."""
ALPHA, BETA = 2.0, -2.0

Span = tuple[int, int]


def full(sample: int) -> str:
    """Return the name of the request for a whole text."""
    return f"full-{sample}"


def evaluator_requests(sample: int, ids: Sequence[int], short: int = SHORT, window: int = WINDOW) -> list[Request]:
    """Return what an evaluator is asked about a text: all of it, and windows with a short context."""
    found = [Request(id=full(sample), tokens=ids)]
    for start in range(0, len(ids) - short, window):
        end = min(start + short + window, len(ids))
        found.append(Request(id=f"short-{sample}-{start}", tokens=ids[start:end], first=short))
    return found


def keys(answers: Answers, sample: int, length: int, short: int = SHORT, window: int = WINDOW) -> list[int]:
    """Return the positions of key tokens in the evaluator's tokens of a text of ``length``."""
    whole = answers.logprobs(full(sample)).astype(np.float64)  # of positions 1, 2, …
    found: list[int] = []
    for start in range(0, length - short, window):
        near = answers.logprobs(f"short-{sample}-{start}").astype(np.float64)
        first = start + short
        long_loss, short_loss = -whole[first - 1 : first - 1 + len(near)], -near
        is_key = (short_loss - long_loss > ALPHA) & (long_loss < -BETA)
        found += (first + np.flatnonzero(is_key)).tolist()
    return found


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return spans of characters in order, those that touch made one."""
    found: list[Span] = []
    for start, end in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def positions(spans: Sequence[Span], keyed: Sequence[Span]) -> list[int]:
    """Return the tokens, given by their ``spans``, that lie wholly within a ``keyed`` span."""
    found, i, j = [], 0, 0
    while i < len(spans) and j < len(keyed):
        if spans[i][0] >= keyed[j][0] and spans[i][1] <= keyed[j][1]:
            found.append(i)
            i += 1
        elif spans[i][0] < keyed[j][0]:
            i += 1
        else:
            j += 1
    return found


def score(rows: Mapping[int, NDArray[np.float32]], keyed: Mapping[int, Sequence[int]], native: int) -> dict[str, Any]:
    """Return LongPPL over all key tokens, and over those beyond the native context, which alone a rope type changes.

    Args:
        rows: by text, the tested model's log-probabilities of positions 1, 2, ….
        keyed: by text, the positions of its key tokens.
    """
    near: list[float] = []
    far: list[float] = []
    for sample, row in rows.items():
        for position in keyed[sample]:
            if 1 <= position <= len(row):
                (far if position >= native else near).append(float(row[position - 1]))
    plain = np.concatenate([row.astype(np.float64) for row in rows.values()])
    return {
        "key_tokens": len(near) + len(far),
        "far_key_tokens": len(far),
        "longppl": _perplexity(near + far),
        "far_longppl": _perplexity(far),
        "ppl": _perplexity(plain.tolist()),
        "tokens": len(plain),
    }


def _perplexity(logprobs: Sequence[float]) -> float | None:
    return math.exp(-sum(logprobs) / len(logprobs)) if logprobs else None
