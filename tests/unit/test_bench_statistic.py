"""Medians, their intervals, and percentiles."""

import random

from thor_spec.bench import statistic


def test_intervals_hold_the_median_most_of_the_time() -> None:
    dice = random.Random(3)
    held = 0
    for i in range(60):
        found = statistic.median_interval([dice.gauss(10, 1) for _ in range(11)], seed=i)
        held += found["low95"] <= 10 <= found["high95"]
    assert held >= 0.85 * 60
    assert statistic.percentile([3, 1, 2], 0.5) == 2
    assert statistic.percentile([1, 2], 1.0) == 2
