"""Rows of a step and the order of paths: the kernels against torch, and torch against plain loops."""

import random

import pytest
import torch

from tests.kernels.cases import random_tree
from thor_spec.kernels.tree_paths.reference import TreePaths, tree_paths
from thor_spec.kernels.tree_rows import kernel, reference
from thor_spec.kernels.tree_rows.reference import Rows

SLOTS, TOKENS = 9, 7000


def nonsense(width: int) -> Rows:
    return Rows(
        row_parents=torch.full((SLOTS, width), 77, dtype=torch.int32),
        lengths=torch.full((SLOTS,), 77, dtype=torch.int32),
        offsets=torch.full((TOKENS,), 77),
        positions=torch.full((TOKENS,), 77),
        paths=TreePaths(masks=torch.full((SLOTS, width), 77), leaves=torch.full((SLOTS,), 77)),
        path=torch.full((SLOTS, width), 77, dtype=torch.int32),
        accepted=torch.full((SLOTS,), 77, dtype=torch.int32),
    )


def trees(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    parents = [random_tree(width, seed) for seed in range(SLOTS)]
    depths = []
    for tree in parents:
        depths.append([0])
        for parent in tree[1:]:
            depths[-1].append(depths[-1][parent] + 1)
    return torch.tensor(parents, dtype=torch.int32), torch.tensor(depths, dtype=torch.int32)


def moved(rows: Rows, device: str) -> Rows:
    given = {name: getattr(rows, name) for name in Rows.__slots__}
    paths = TreePaths(masks=rows.paths.masks.to(device), leaves=rows.paths.leaves.to(device))
    return Rows(**{**{name: x.to(device) for name, x in given.items() if name != "paths"}, "paths": paths})


def tensors(rows: Rows) -> dict[str, torch.Tensor]:
    given = {name: getattr(rows, name).cpu() for name in Rows.__slots__ if name != "paths"}
    return {**given, "masks": rows.paths.masks.cpu(), "leaves": rows.paths.leaves.cpu()}


@pytest.mark.parametrize("width", [2, 9, 33])
def test_rows(width: int, device: str) -> None:
    """Verified ones and prompts, which may be longer than any tree and than what a program copies at once."""
    rng = random.Random(width)
    parents, depths = trees(width)
    for rows in (1, 4, SLOTS):
        verified = [rng.random() < 0.6 for _ in range(rows)]
        counts = [rng.randint(1, min(width, 13)) if own else rng.choice([1, 40, 700]) for own in verified]
        total = sum(counts)
        starts = torch.tensor([0, *counts, *[0] * (SLOTS - rows)]).cumsum(0).to(torch.int32)
        slots = torch.randperm(SLOTS)[:rows]
        lengths = torch.randint(20, 90, (SLOTS,), dtype=torch.int32)
        linear = torch.randint(0, 1000, (total + 5,)) * torch.randint(0, 2, (total + 5,))  # 0: of dummy runs
        judged = torch.tensor([*verified, *[True] * (SLOTS - rows)])  # nonsense behind the rows in use
        given = parents, depths, slots, judged, starts, lengths, linear
        want = nonsense(width)
        reference.lay_rows(want, *given)
        got = moved(nonsense(width), device)
        kernel.lay_rows(got, *(t.to(device) for t in given))
        for (name, ours), theirs in zip(tensors(want).items(), tensors(got).values(), strict=True):
            assert torch.equal(ours, theirs), name
        offsets = [0] * (total + 5) + [77] * (TOKENS - total - 5)
        for r in range(rows):
            slot, first = int(slots[r]), int(starts[r])
            own = parents[slot].tolist() if verified[r] else list(range(-1, width - 1))
            assert want.row_parents[r].tolist() == own
            assert int(want.lengths[r]) == (int(lengths[r]) if verified[r] else 0)
            for node in range(counts[r] if verified[r] else 0):
                in_a_line = int(linear[first + node])
                offsets[first + node] = max(in_a_line + int(depths[slot, node]) - node, 0) - in_a_line
        assert want.offsets.tolist() == offsets
        assert want.positions[: total + 5].tolist() == [
            a + b for a, b in zip(linear.tolist(), offsets[: total + 5], strict=True)
        ]
        assert want.path.tolist() == [list(range(width))] * SLOTS
        assert not want.accepted.any()
        assert want.row_parents[rows:].tolist() == [list(range(-1, width - 1))] * (SLOTS - rows)
        paths = tree_paths(want.row_parents[:rows], starts[: rows + 1])
        assert torch.equal(want.paths.masks[:rows], paths.masks)
        assert torch.equal(want.paths.leaves[:rows], paths.leaves)


@pytest.mark.parametrize("width", [2, 9])
def test_order_of_paths(width: int, device: str) -> None:
    rng = random.Random(width)
    counts = [rng.randint(1, width) for _ in range(5)]
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    path = torch.randint(0, width, (5, width), dtype=torch.int32)
    accepted = torch.tensor([rng.randint(0, n) for n in counts], dtype=torch.int32)
    want, got = torch.arange(sum(counts)), torch.arange(sum(counts)).to(device)
    reference.path_order(want, path, accepted, starts)
    kernel.path_order(got, *(t.to(device) for t in (path, accepted, starts)))
    assert torch.equal(want, got.cpu())
    plain = list(range(sum(counts)))
    for r in range(5):
        for depth in range(int(accepted[r])):
            plain[int(starts[r]) + depth] = int(starts[r]) + int(path[r, depth])
    assert want.tolist() == plain
