"""Trees on tensors against ``ddtree.best_first``, which is held against exhaustive search in ``unit/test_ddtree``."""

import math
import random
from collections.abc import Callable

import pytest
import torch

from thor_spec.ddtree import best_first
from thor_spec.ddtree.shape import TreeShape
from thor_spec.kernels.tree_build import kernel, reference
from thor_spec.kernels.tree_build.reference import Layout, Trees

Build = Callable[..., Trees]
BUILDS = [pytest.param(reference.build_trees, id="torch"), pytest.param(kernel.build_trees, id="triton")]


def marginals(
    seed: int, requests: int, positions: int, width: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(requests, positions, 50, generator=generator)
    scores, tokens = logits.log_softmax(-1).topk(width)
    return scores.contiguous().to(device), tokens.contiguous().to(device)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("shape", [(3, 7, 7, 12), (2, 1, 4, 3), (1, 15, 16, 63), (2, 3, 1, 3)])
def test_the_best_trees(build: Build, shape: tuple[int, int, int, int], device: str) -> None:
    requests, positions, width, nodes = shape
    scores, tokens = marginals(nodes, requests, positions, width, device)
    found = build(scores, tokens, torch.zeros(requests, dtype=torch.bool, device=device), nodes=nodes)
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
def test_chains_end_in_padding_and_leave_their_neighbours_alone(build: Build, device: str) -> None:
    scores, tokens = marginals(1, 3, 4, 5, device)
    found = build(scores, tokens, torch.tensor([True, False, True], device=device), nodes=6)
    no_chains = torch.zeros(1, dtype=torch.bool, device=device)
    alone = build(scores[1:2].contiguous(), tokens[1:2].contiguous(), no_chains, nodes=6)
    for r in (0, 2):
        assert found.parents[r].tolist() == [-1, 0, 1, 2, 3, -1, -1]
        assert found.depths[r].tolist() == [0, 1, 2, 3, 4, 0, 0]
        assert found.tokens[r, :4].tolist() == tokens[r, :, 0].tolist()
        assert found.tokens[r].min() >= 0
    for ours, theirs in zip(vars_of(found), vars_of(alone), strict=True):
        assert torch.equal(ours[1], theirs[0])


@pytest.mark.parametrize("build", BUILDS)
def test_more_nodes_than_candidates_and_a_spine(build: Build, device: str) -> None:
    scores, tokens = marginals(2, 1, 2, 2, device)
    no_chains = torch.zeros(1, dtype=torch.bool, device=device)
    found = build(scores, tokens, no_chains, nodes=9)
    assert sorted(found.depths[0].tolist()) == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]  # 2 + 4 candidates, 3 of padding
    scores, tokens = marginals(3, 1, 6, 6, device)
    found = build(scores, tokens, no_chains, nodes=9, spine=6)
    assert found.parents[0, :7].tolist() == [-1, 0, 1, 2, 3, 4, 5]
    rest = found.parents[0, 7:].tolist()
    free = build(scores, tokens, no_chains, nodes=9)
    assert len(rest) == 3
    assert found.parents.tolist() != free.parents.tolist()


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("nodes", [3, 9])
def test_straight_ones_are_chains_with_the_scores_of_trees(build: Build, nodes: int, device: str) -> None:
    scores, tokens = marginals(4, 3, 5, 6, device)
    chains = torch.tensor([False, True, False], device=device)
    free, found = (build(scores, tokens, chains, nodes=nodes, straight=straight) for straight in (False, True))
    chained = build(scores, tokens, torch.ones(3, dtype=torch.bool, device=device), nodes=nodes)
    assert torch.equal(found.scores, free.scores)
    assert torch.equal(found.parents, chained.parents)
    assert torch.equal(found.depths, chained.depths)
    assert torch.equal(found.tokens[:, :5], chained.tokens[:, :5])
    assert found.tokens.min() >= 0
    assert not torch.equal(free.parents, chained.parents)


@pytest.mark.parametrize("build", BUILDS)
def test_trees_go_where_their_requests_are(build: Build, device: str) -> None:
    scores, tokens = marginals(5, 3, 4, 5, device)
    slots, out = torch.tensor([4, 0, 2], dtype=torch.int32, device=device), Trees.allocate(5, 6, device)
    for buffer in vars_of(out):
        buffer.fill_(-7)
    chains = torch.tensor([True, False, False, False, False], device=device)
    want = build(scores, tokens, chains[slots.long()], nodes=6)
    assert build(scores, tokens, chains, nodes=6, slots=slots, out=out) is out
    assert torch.equal(out.parents[slots.long()], want.parents)
    assert torch.equal(out.depths[slots.long()], want.depths)
    assert torch.equal(out.tokens[:3], want.tokens)
    assert torch.equal(out.scores[:3], want.scores)
    assert all((buffer[[1, 3]] == -7).all() for buffer in (out.parents, out.depths))
    assert all((buffer[3:] == -7).all() for buffer in (out.tokens, out.scores))


@pytest.mark.parametrize(
    "lay", [pytest.param(reference.lay_widths, id="torch"), pytest.param(kernel.lay_widths, id="triton")]
)
def test_fixed_widths(lay: Build, device: str) -> None:
    """Every path carries the tokens of its ranks; a request that wants a chain gets one, and padding."""
    shape = TreeShape(nodes=3 + 6 + 6, depth=3, widths=(3, 2, 1))
    layout = Layout(*(torch.tensor(x, dtype=torch.int32, device=device) for x in shape.layout()))
    _, tokens = marginals(6, 3, 3, 4, device)
    slots, out = torch.tensor([1, 3, 0], dtype=torch.int32, device=device), Trees.allocate(4, 15, device)
    for buffer in vars_of(out):
        buffer.fill_(-7)
    lay(layout, tokens, torch.tensor([False, True, False, False], device=device), slots=slots, out=out)
    ranks = shape.layout()[2]
    for r, slot in ((1, 3), (2, 0)):
        assert out.parents[slot].tolist() == list(shape.layout()[0])
        assert out.depths[slot].tolist() == list(shape.layout()[1])
        for node in range(1, 16):
            assert out.tokens[r, node - 1] == tokens[r, out.depths[slot, node] - 1, ranks[node]]
    assert out.parents[1].tolist() == [-1, 0, 1, 2, *[-1] * 12]
    assert out.depths[1].tolist() == [0, 1, 2, 3, *[0] * 12]
    assert out.tokens[0, :3].tolist() == tokens[0, :, 0].tolist()
    assert out.tokens[0].min() >= 0
    assert (out.parents[2] == -7).all()


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
