"""Shapes, budgets and the optimum of draft trees."""

import functools
import random

import pytest
import torch

from thor_spec.ddtree import budget
from thor_spec.ddtree.shape import TreeShape
from thor_spec.errors import ConfigError
from thor_spec.kernels.tree_build.reference import build_trees


def optimum(probabilities: list[list[float]], nodes: int) -> float:
    """Return the most expected accepted drafts of any prefix-closed set, over all ways of sharing nodes out."""

    @functools.cache
    def below(depth: int, count: int) -> float:
        return shared(depth, 0, count) if depth < len(probabilities) else 0.0

    @functools.cache
    def shared(depth: int, rank: int, count: int) -> float:
        if rank == len(probabilities[depth]) or count == 0:
            return 0.0
        own = (probabilities[depth][rank] * (1 + below(depth + 1, m - 1)) for m in range(1, count + 1))
        rest = [shared(depth, rank + 1, count - m) for m in range(1, count + 1)]
        return max(shared(depth, rank + 1, count), *(a + b for a, b in zip(own, rest, strict=True)))

    return below(0, nodes)


def expected(parents: list[int], tokens: list[int], depths: list[int], scores: torch.Tensor, of: torch.Tensor) -> float:
    total, probability = 0.0, [1.0]
    for n in range(1, len(parents)):
        rank = of[depths[n] - 1].tolist().index(tokens[n - 1]) if parents[n] >= 0 else -1
        probability.append(probability[parents[n]] * float(scores[depths[n] - 1, rank].exp()) if rank >= 0 else 0.0)
        total += probability[-1]
    return total


def test_the_optimum_on_a_thousand_marginals() -> None:
    rng, cases = random.Random(0), 0
    while cases < 1000:
        depth, width, nodes = rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 12)
        generator = torch.Generator().manual_seed(cases)
        logits = rng.choice([0.5, 2.0, 5.0]) * torch.randn(10, depth, 20, generator=generator)
        scores, tokens = logits.log_softmax(-1).topk(width)
        found = build_trees(scores, tokens, torch.zeros(10, dtype=torch.bool), nodes=nodes)
        for r in range(10):
            lists = found.parents[r].tolist(), found.tokens[r].tolist(), found.depths[r].tolist()
            best = optimum(scores[r].exp().tolist(), nodes)
            assert expected(*lists, scores[r], tokens[r]) == pytest.approx(best, abs=1e-5)
        cases += 10


@pytest.mark.parametrize(
    ("text", "nodes", "depth", "widths"),
    [
        ("16", 16, None, ()),
        ("16,7", 16, 7, ()),
        ("3,3,3", 39, 3, (3, 3, 3)),
        ("3x3", 12, 2, (3, 3)),
        ("1x1x1", 3, 3, (1, 1, 1)),
    ],
)
def test_shapes(text: str, nodes: int, depth: int | None, widths: tuple[int, ...]) -> None:
    assert TreeShape.parse(text) == TreeShape(nodes=nodes, depth=depth, widths=widths)


@pytest.mark.parametrize("text", ["", "0", "64", "3,4,5,6", "7,8", "-1", "auto,", "auto,64", "auto,7,3", "2x", "many"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        TreeShape.parse(text)


def test_auto() -> None:
    shape = TreeShape.parse("auto")
    assert shape is not None
    assert shape == TreeShape(nodes=32, auto=True) == TreeShape.parse("auto,32")
    assert shape.sizes(15) == (1, 2, 4, 6, 8, 12, 15, 16, 24, 32)
    assert TreeShape(nodes=5, auto=True).sizes(7) == (1, 2, 4, 5)


def test_off_and_a_drafter_that_is_too_shallow() -> None:
    assert TreeShape.parse("off") is None
    with pytest.raises(ConfigError, match="drafts 7"):
        TreeShape(nodes=16, depth=9).deep(7)
    assert TreeShape(nodes=16).deep(7) == 7
    assert TreeShape(nodes=4).deep(7) == 4


def test_the_layout_of_fixed_widths() -> None:
    parents, depths, ranks = TreeShape(nodes=6, depth=2, widths=(2, 2)).layout()
    assert parents == (-1, 0, 0, 1, 1, 2, 2)
    assert depths == (0, 1, 1, 2, 2, 2, 2)
    assert ranks == (0, 0, 1, 0, 1, 0, 1)


def test_isotonic_regression_is_the_nearest_monotone_sequence() -> None:
    assert budget.isotonic([1, 3, 2, 4], [1, 1, 1, 1]) == [1, 2.5, 2.5, 4]
    assert budget.isotonic([4, 1], [3, 1]) == [3.25, 3.25]
    rng = random.Random(1)
    for _ in range(20):
        values, weights = [rng.random() for _ in range(5)], [rng.choice([1, 2]) for _ in range(5)]
        ours = budget.isotonic(values, weights)
        assert ours == sorted(ours)

        def error(fitted: list[float], to: list[float] = values, by: list[int] = weights) -> float:
            return sum(w * (a - b) ** 2 for a, b, w in zip(fitted, to, by, strict=True))

        for _ in range(200):  # no monotone sequence nearby is closer
            other = sorted(x + 0.05 * rng.gauss(0, 1) for x in ours)
            assert error(other) >= error(ours) - 1e-12


def test_the_budget_looks_behind_a_dip() -> None:
    """The measured steps of a mixture of experts: the first fall is at 5 nodes, the best number is 12."""
    increments = {1: 2.95, 2: 3.32, 4: 3.04, 6: 3.04, 8: 0.79, 10: 1.85, 12: 0.99}
    seconds, measured = 40.0, [(0, 40.0)]
    for n in range(1, 13):
        seconds += next(v for k, v in increments.items() if k >= n)
        measured.append((n, seconds))
    costs = budget.Costs.fit(3.0, measured)
    probabilities = [0.8 * 0.97**n for n in range(12)]
    rate = [(1 + sum(probabilities[:n])) / costs.of(n) for n in range(13)]
    assert budget.choose(probabilities, costs).nodes == max(range(13), key=rate.__getitem__)
    for measured_sizes in ((0, 2, 5, 12), (0, 1, 4, 8, 12), tuple(range(13))):
        coarse = budget.Costs.fit(3.0, [(n, s) for n, s in measured if n in measured_sizes])
        by_all = [(1 + sum(probabilities[:n])) / coarse.of(n) for n in range(13)]
        assert budget.choose(probabilities, coarse).rate == max(by_all)
    assert budget.choose([1e-6] * 12, costs).nodes == 0
    assert budget.choose([1e-6] * 12, costs, fewest=2).nodes == 2
    assert budget.choose([0.9999] * 12, costs).nodes == 12


def test_costs_are_those_of_the_next_graph() -> None:
    costs = budget.Costs.fit(1.0, [(0, 5.0), (8, 7.0), (8, 9.0), (16, 7.5)])
    assert costs.verify == (5.0, pytest.approx(23.5 / 3), pytest.approx(23.5 / 3))
    assert costs.of(3) == costs.of(8)
    assert costs.of(0) == 5.0
