"""Trees on tensors against ``ddtree.best_first``, which is held against exhaustive search in ``unit/test_ddtree``."""

import math
import random
from collections.abc import Callable

import pytest
import torch

from thor_spec.ddtree import best_first
from thor_spec.kernels.tree_build import kernel, reference
from thor_spec.kernels.tree_build.reference import Trees

Build = Callable[..., Trees]
BUILDS = [pytest.param(reference.build_trees, id="torch"), pytest.param(kernel.build_trees, id="triton")]


def marginals(seed: int, requests: int, positions: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(requests, positions, 50, generator=generator)
    scores, tokens = logits.log_softmax(-1).topk(width)
    return scores.contiguous(), tokens.contiguous()


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("shape", [(3, 7, 7, 12), (2, 1, 4, 3), (1, 15, 16, 63), (2, 3, 1, 3)])
def test_the_best_trees(build: Build, shape: tuple[int, int, int, int]) -> None:
    requests, positions, width, nodes = shape
    scores, tokens = marginals(nodes, requests, positions, width)
    found = build(scores, tokens, torch.zeros(requests, dtype=torch.bool), nodes=nodes)
    for r in range(requests):
        given = [
            [(int(t), float(s)) for t, s in zip(tokens[r, k], scores[r, k], strict=True)] for k in range(positions)
        ]
        tree = best_first.build(0, given, nodes)
        assert found.parents[r].tolist() == list(tree.parents)
        assert found.tokens[r].tolist() == list(tree.tokens[1:])
        assert found.depths[r].tolist() == list(tree.depths())
        of = [dict(position) for position in given]
        log_probability = [0.0]
        for node in range(1, len(tree.tokens)):
            own = of[tree.depths()[node] - 1][tree.tokens[node]]
            log_probability.append(log_probability[tree.parents[node]] + own)
        assert found.scores[r, : len(tree.tokens) - 1].tolist() == pytest.approx(log_probability[1:], abs=1e-4)
        assert found.scores[r, len(tree.tokens) - 1 :].isneginf().all()


@pytest.mark.parametrize("build", BUILDS)
def test_chains_end_in_padding_and_leave_their_neighbours_alone(build: Build) -> None:
    scores, tokens = marginals(1, 3, 4, 5)
    found = build(scores, tokens, torch.tensor([True, False, True]), nodes=6)
    alone = build(scores[1:2].contiguous(), tokens[1:2].contiguous(), torch.zeros(1, dtype=torch.bool), nodes=6)
    for r in (0, 2):
        assert found.parents[r].tolist() == [-1, 0, 1, 2, 3, -1, -1]
        assert found.depths[r].tolist() == [0, 1, 2, 3, 4, 0, 0]
        assert found.tokens[r, :4].tolist() == tokens[r, :, 0].tolist()
        assert found.tokens[r].min() >= 0
    for ours, theirs in zip(vars_of(found), vars_of(alone), strict=True):
        assert torch.equal(ours[1], theirs[0])


@pytest.mark.parametrize("build", BUILDS)
def test_more_nodes_than_candidates_and_a_spine(build: Build) -> None:
    scores, tokens = marginals(2, 1, 2, 2)
    no_chains = torch.zeros(1, dtype=torch.bool)
    found = build(scores, tokens, no_chains, nodes=9)
    assert sorted(found.depths[0].tolist()) == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]  # 2 + 4 candidates, 3 of padding
    scores, tokens = marginals(3, 1, 6, 6)
    found = build(scores, tokens, no_chains, nodes=9, spine=6)
    assert found.parents[0, :7].tolist() == [-1, 0, 1, 2, 3, 4, 5]
    rest = found.parents[0, 7:].tolist()
    free = build(scores, tokens, no_chains, nodes=9)
    assert len(rest) == 3
    assert found.parents.tolist() != free.parents.tolist()


def vars_of(trees: Trees) -> tuple[torch.Tensor, ...]:
    return trees.tokens, trees.parents, trees.depths, trees.scores


def test_expected_accepted_length() -> None:
    """On simulated targets that follow the marginals, trees accept the sum of their prefix probabilities."""
    rng = random.Random(5)
    scores, tokens = marginals(6, 1, 5, 8)
    found = reference.build_trees(scores, tokens, torch.zeros(1, dtype=torch.bool), nodes=12)
    parents, depths, drafted = found.parents[0].tolist(), found.depths[0].tolist(), [-1, *found.tokens[0].tolist()]
    log_probability = [0.0]
    for n in range(1, 13):
        place = tokens[0, depths[n] - 1].tolist().index(drafted[n])
        log_probability.append(log_probability[parents[n]] + float(scores[0, depths[n] - 1, place]))
    expected = sum(map(math.exp, log_probability[1:]))
    children = {(parents[n], drafted[n]): n for n in range(1, 13)}
    rounds, accepted = 20_000, 0
    for _ in range(rounds):
        node = 0
        for k in range(5):
            weights = scores[0, k].exp().tolist()
            drawn = rng.choices([*tokens[0, k].tolist(), None], [*weights, max(0.0, 1 - sum(weights))])[0]
            if (node, drawn) not in children:
                break
            node = children[node, drawn]
        accepted += depths[node]
    assert abs(accepted / rounds - expected) < 5 * math.sqrt(5 / rounds)
