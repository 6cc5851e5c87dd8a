"""The walk over a batch against ``ddtree.walk``, request by request, exact and relaxed."""

import random
from collections.abc import Callable

import pytest
import torch

from thor_spec.ddtree.tree import Tree
from thor_spec.ddtree.walk import relaxed_walk, walk
from thor_spec.errors import ConfigError
from thor_spec.kernels.tree_walk import kernel, reference
from thor_spec.kernels.tree_walk.reference import Trees, Walked

Walk = Callable[..., Walked]
WALKS = [pytest.param(reference.tree_walk, id="torch"), pytest.param(kernel.tree_walk, id="triton")]
VOCABULARY = 4


def random_tree(rng: random.Random, nodes: int) -> Tree:
    parents, tokens, taken = [-1], [0], set[tuple[int, int]]()
    while len(parents) < nodes:
        edge = rng.randrange(max(0, len(parents) - 6), len(parents)), rng.randrange(VOCABULARY)
        if edge not in taken:
            taken.add(edge)
            parents.append(edge[0])
            tokens.append(edge[1])
    return Tree(tokens=tuple(tokens), parents=tuple(parents))


def batch(
    trees: list[Tree], width: int, counts: list[int], device: str = "cpu"
) -> tuple[Trees, torch.Tensor, torch.Tensor]:
    """Return the trees by slot, the last request's first; their drafts as far as a scheduler left them; starts."""
    slots = len(trees) + 2
    parents, depths = torch.full((slots, width), -1), torch.zeros(slots, width)
    for r, tree in enumerate(reversed(trees)):
        parents[r, : len(tree.parents)] = torch.tensor(tree.parents)
        depths[r, : len(tree.parents)] = torch.tensor(tree.depths())
    found = Trees(
        parents=parents.to(device, torch.int32), depths=depths.to(device, torch.int32),
        path=torch.full((slots, width), -7, dtype=torch.int32, device=device),
        accepted=torch.full((slots,), -7, dtype=torch.int32, device=device),
        counts=torch.zeros(3, width, dtype=torch.int64, device=device),
    )  # fmt: skip
    drafts = torch.tensor([token for tree, n in zip(trees, counts, strict=True) for token in tree.tokens[:n]])
    return found, drafts.to(device), torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)


def cut(tree: Tree, count: int) -> Tree:
    return Tree(tokens=tree.tokens[:count], parents=tree.parents[:count])


@pytest.mark.parametrize("go", WALKS)
@pytest.mark.parametrize("width", [1, 2, 9, 64])
@pytest.mark.parametrize("relaxed", [False, True], ids=["exact", "relaxed"])
def test_walk(go: Walk, width: int, relaxed: bool, device: str) -> None:
    rng = random.Random(width)
    whole = [random_tree(rng, rng.randint(1, width)) for _ in range(24)]
    counts = [rng.randint(1, len(tree.tokens)) for tree in whole]
    trees = [cut(tree, count) for tree, count in zip(whole, counts, strict=True)]
    given, drafts, starts = batch(whole, width, counts, device)
    choices = [[rng.randrange(VOCABULARY) for _ in tree.tokens] for tree in trees]
    # Few probabilities, so that children tie; thresholds that are off, low and high.
    p = [[[rng.choice([0.05, 0.2, 0.4]) for _ in range(VOCABULARY)] for _ in tree.tokens] for tree in trees]
    thresholds = [[rng.choice([0.0, 0.1, 0.3]) if relaxed else 0.0 for _ in tree.tokens] for tree in trees]
    likely = torch.rand(len(trees), width)  # nonsense behind a request's own nodes
    for r, tree in enumerate(trees):
        for node in range(1, len(tree.tokens)):
            at = tree.parents[node]
            own = p[r][at][tree.tokens[node]]
            likely[r, node] = own if own >= thresholds[r][at] > 0 else 0.0
    slots = torch.arange(len(trees), device=device).flip(0)
    flat = torch.tensor([choice for row in choices for choice in row], device=device)
    found = go(given, drafts, flat, starts, slots, likely.to(device) if relaxed else None)
    want, longer, kinds = torch.zeros(3, width, dtype=torch.int64), 0, {}
    for r, tree in enumerate(trees):
        of_request = p[r]
        path = relaxed_walk(tree, choices[r], lambda node, token, q=of_request: q[node][token], thresholds[r])
        longer += len(path) > len(walk(tree, choices[r]))
        tokens = [tree.tokens[n] for n in path[1:]] + [choices[r][path[-1]]]
        first = int(starts[r])
        assert int(found.counts[r]) == int(given.accepted[r]) == len(path)
        assert found.tokens[r].tolist() == tokens + [0] * (width - len(path))
        assert given.path[r].tolist() == [*path, *range(len(path), width)]
        rows = [first + n for n in (*path, *range(len(path), len(tree.tokens)))]
        assert found.order[first : first + len(tree.tokens)].tolist() == rows
        if len(tree.tokens) > 1:
            for i, number in enumerate((len(tree.tokens) - 1, max(tree.depths()), len(path) - 1)):
                want[i, number] += 1
        kinds[len(path)] = True
    assert torch.equal(given.counts.cpu(), want)
    assert width < 9 or (len(kinds) > 2 and (longer > 0) == relaxed)


@pytest.mark.parametrize("go", WALKS)
def test_placeholders_and_what_a_grammar_forbids_are_not_accepted(go: Walk, device: str) -> None:
    trees = [random_tree(random.Random(i), 12) for i in range(5)]
    given, drafts, starts = batch(trees, 12, [12] * 5, device)
    drafts.view(5, 12)[:, 1:] = -1
    found = go(given, drafts, torch.full((60,), -1, device=device), starts, torch.arange(5, device=device).flip(0))
    assert found.counts.tolist() == [1] * 5
    assert given.accepted[:5].tolist() == [1] * 5
    assert given.accepted[5:].tolist() == [-7, -7]


def test_a_layout_that_does_not_fit_is_refused() -> None:
    given, drafts, starts = batch([random_tree(random.Random(0), 4)], 4, [4])
    with pytest.raises(ConfigError):
        kernel.tree_walk(given, drafts.repeat(2)[::2], drafts, starts, torch.zeros(1))
