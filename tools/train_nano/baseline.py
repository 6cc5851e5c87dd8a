"""What a byte model without a network reaches on the held-out text: the number to stand beside bits per byte."""

import math

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def unigram_bits(train: Bytes, held_out: Bytes) -> float:
    """Return bits per byte under the byte frequencies of ``train``, add-one smoothed."""
    counts = np.bincount(train, minlength=256) + 1
    bits = -np.log2(counts / counts.sum())
    return float(bits[held_out].mean())


def ngram_bits(train: Bytes, held_out: Bytes, order: int = 5) -> float:
    """Return bits per byte of an interpolated ``order``-gram model with Witten-Bell weights.

    p_n(c|h) = (count(hc) + kinds(h) * p_{n-1}(c|h')) / (count(h) + kinds(h)), from the uniform p_0 = 1/256, with
    kinds(h) the number of different bytes seen after h. A context never seen leaves p_{n-1} as it is.
    """
    probability = np.full(len(held_out) - order + 1, 1 / 256)
    for size in range(1, order + 1):
        grams, counts = np.unique(_codes(train, size), return_counts=True)
        contexts, starts = np.unique(grams >> 8, return_index=True)
        totals = np.add.reduceat(counts, starts)
        kinds = np.diff(np.append(starts, len(grams)))
        asked = _codes(held_out, size)[order - size :]
        seen = _look_up(grams, counts, asked)
        total, kind = _look_up(contexts, totals, asked >> 8), _look_up(contexts, kinds, asked >> 8)
        known = total > 0
        mixed = (seen + kind * probability) / np.maximum(total + kind, 1)
        probability = np.where(known, mixed, probability)
    return float(-np.log2(probability).mean()) if len(probability) else math.nan


def _codes(data: Bytes, size: int) -> NDArray[np.int64]:
    """Return one integer per window of ``size`` bytes; the last byte is the lowest."""
    codes = np.zeros(len(data) - size + 1, np.int64)
    for offset in range(size):
        codes = (codes << 8) | data[offset : offset + len(codes)]
    return codes


def _look_up(keys: NDArray[np.int64], values: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:
    place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[place] == asked, values[place], 0)
