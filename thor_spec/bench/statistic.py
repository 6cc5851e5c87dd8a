"""Medians with intervals, of samples and of ratios of samples taken side by side."""

import random
import statistics
from collections.abc import Sequence

BOOTSTRAPS = 5_000
LOW, HIGH = 0.025, 0.975


def median_interval(values: Sequence[float], *, seed: int = 0) -> dict[str, float | int]:
    """Return the median of ``values`` with a bootstrapped 95 % interval."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(BOOTSTRAPS))
    return {
        "median": statistics.median(values),
        "low95": medians[int(LOW * BOOTSTRAPS)],
        "high95": medians[int(HIGH * BOOTSTRAPS)],
        "n": len(values),
    }


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> dict[str, float | int]:
    """Return the median of ``ours / theirs``, repetition by repetition, with its interval."""
    return median_interval([a / b for a, b in zip(ours, theirs, strict=True)], seed=seed)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of ``values`` lie, by the nearest rank."""
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)]
