"""Ancestor masks against walking up the parents."""

import pytest
import torch

from tests.kernels.cases import Parents, chain, comb, full, path_to, random_tree, star
from thor_spec.errors import ConfigError
from thor_spec.kernels.tree_paths import kernel, reference

TREES = [chain(64), star(64), comb(63), full([3, 3, 3]), random_tree(50, 1), [-1], [-1, -1, 0, 7, -9, 3]]


def table(trees: list[Parents], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    parents = torch.full((len(trees), width), 5, dtype=torch.int32)  # nonsense behind a request's own nodes
    for r, tree in enumerate(trees):
        parents[r, : len(tree)] = torch.tensor(tree[:width], dtype=torch.int32)[:width]
    counts = torch.tensor([0, *map(len, trees)])
    return parents, counts.cumsum(0).to(torch.int32)


@pytest.mark.parametrize("width", [1, 6, 33, 64])
def test_kernel_equals_reference(width: int, device: str) -> None:
    trees = [tree[:width] for tree in TREES]
    parents, cu = table(trees, width)
    want = reference.tree_paths(parents, cu)
    got = kernel.tree_paths(parents.to(device), cu.to(device))
    assert torch.equal(want.masks, got.masks.cpu())
    assert torch.equal(want.leaves, got.leaves.cpu())


def test_reference_walks_up() -> None:
    trees = TREES[:6]
    parents, cu = table(trees, 64)
    found = reference.tree_paths(parents, cu)
    for r, tree in enumerate(trees):
        for t in range(len(tree)):
            mask = int(found.masks[r, t]) & (1 << 64) - 1
            assert [i for i in range(64) if mask >> i & 1] == path_to(tree, t)
        leaves = int(found.leaves[r]) & (1 << 64) - 1
        assert [i for i in range(64) if leaves >> i & 1] == [t for t in range(len(tree)) if t not in tree]


def test_parents_that_do_not_come_first_make_roots() -> None:
    parents, cu = table([[-1, -1, 0, 7, -9, 3]], 6)
    assert kernel_or_reference(parents, cu)[0, :6].tolist() == [1, 2, 5, 8, 16, 40]


def kernel_or_reference(parents: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    return reference.tree_paths(parents, cu).masks


def test_requests_longer_than_the_buffers_are_cut() -> None:
    parents, _ = table([chain(8)], 8)
    masks = reference.tree_paths(parents, torch.tensor([0, 30])).masks
    assert masks[0].tolist() == [(2 << t) - 1 for t in range(8)]


def test_more_than_64_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 64"):
        kernel.tree_paths(torch.zeros(1, 65, dtype=torch.int32), torch.tensor([0, 65]))
