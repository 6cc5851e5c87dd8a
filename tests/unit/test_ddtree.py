"""Against the slowest obvious version: every prefix-closed set of candidates."""

import itertools
import math
import random

import pytest

from thor_spec.ddtree import best_first
from thor_spec.ddtree.tree import Tree, chain
from thor_spec.ddtree.walk import walk
from thor_spec.errors import ConfigError


def random_marginals(rng: random.Random, depth: int, width: int) -> list[list[tuple[int, float]]]:
    marginals = []
    for _ in range(depth):
        weights = sorted((rng.random() ** 3 + 1e-6 for _ in range(width + 1)), reverse=True)
        tokens = rng.sample(range(100), width)
        marginals.append([(t, math.log(w / sum(weights))) for t, w in zip(tokens, weights, strict=False)])
    return marginals


def prefixes(depth: int, width: int) -> list[tuple[int, ...]]:
    return [p for d in range(1, depth + 1) for p in itertools.product(range(width), repeat=d)]


def probability(prefix: tuple[int, ...], marginals: best_first.LogMarginals) -> float:
    return math.exp(sum(marginals[d][rank][1] for d, rank in enumerate(prefix)))


def expected_length(tree: Tree, marginals: best_first.LogMarginals) -> float:
    total = 0.0
    for node in range(1, len(tree.tokens)):
        steps = tree.path(node)[1:]
        total += math.exp(sum(dict(marginals[d])[tree.tokens[n]] for d, n in enumerate(steps)))
    return total


@pytest.mark.parametrize("seed", range(40))
def test_no_prefix_closed_set_is_better(seed: int) -> None:
    rng = random.Random(seed)
    depth, width, drafts = rng.choice([(2, 2, 4), (3, 2, 5), (2, 3, 6), (3, 2, 3)])
    marginals = random_marginals(rng, depth, width)
    all_prefixes = prefixes(depth, width)
    best = max(
        sum(probability(p, marginals) for p in chosen)
        for chosen in itertools.combinations(all_prefixes, drafts)
        if all(p[:-1] in chosen or len(p) == 1 for p in chosen)
    )
    tree = best_first.build(7, marginals, drafts)
    assert len(tree.tokens) == drafts + 1
    assert expected_length(tree, marginals) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_every_prefix_is_the_best_tree_of_its_size(seed: int) -> None:
    marginals = random_marginals(random.Random(seed), 5, 4)
    largest = best_first.build(7, marginals, 30)
    for drafts in range(31):
        smaller = best_first.build(7, marginals, drafts)
        assert (largest.tokens[: drafts + 1], largest.parents[: drafts + 1]) == (smaller.tokens, smaller.parents)


def test_a_budget_beyond_all_candidates_and_none_at_all() -> None:
    marginals = random_marginals(random.Random(0), 2, 2)
    assert len(best_first.build(7, marginals, 100).tokens) == 1 + 2 + 4
    assert best_first.build(7, [], 5) == chain([7])
    assert best_first.build(7, marginals, 0) == chain([7])


@pytest.mark.parametrize("seed", range(30))
def test_walk_emits_what_the_target_alone_emits(seed: int) -> None:
    rng = random.Random(seed)
    tree = best_first.build(7, random_marginals(rng, 4, 3), 20)

    def target(prefix: tuple[int, ...]) -> int:  # any deterministic next token, often one of the drafts
        children = sorted({tree.tokens[n] for n in range(1, len(tree.tokens))})
        return random.Random(str((seed, prefix))).choice(children)

    choices = [target(tuple(tree.tokens[n] for n in tree.path(node))) for node in range(len(tree.tokens))]
    path = walk(tree, choices)
    emitted = [tree.tokens[n] for n in path[1:]] + [choices[path[-1]]]
    alone: list[int] = []
    while len(alone) < len(emitted):
        alone.append(target((tree.tokens[0], *alone)))
    assert emitted == alone
    assert choices[path[-1]] not in {tree.tokens[n] for n, p in enumerate(tree.parents) if p == path[-1]}


def test_layout() -> None:
    tree = Tree(tokens=(9, 1, 2, 3, 1), parents=(-1, 0, 0, 1, 2))
    assert tree.depths() == (0, 1, 1, 2, 2)
    assert tree.ancestors() == (0b1, 0b11, 0b101, 0b1011, 0b10101)
    assert tree.path(4) == (0, 2, 4)


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [((), ()), ((1,), (0,)), ((1, 2), (-1, 1)), ((1, 2), (-1, -1)), ((1, 2, 2), (-1, 0, 0)), ((1, 2), (-1,))],
)
def test_what_is_no_tree_is_refused(tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        Tree(tokens=tokens, parents=parents)
