"""Rows of a step and the order of paths: the kernels against torch, and torch against plain loops."""

import random

import pytest
import torch

from tests.kernels.cases import random_tree
from thor_spec.kernels.tree_rows import kernel, reference
from thor_spec.kernels.tree_rows.reference import Rows

SLOTS, TOKENS = 9, 120


def nonsense(width: int) -> Rows:
    return Rows(
        row_parents=torch.full((SLOTS, width), 77, dtype=torch.int32),
        lengths=torch.full((SLOTS,), 77, dtype=torch.int32),
        offsets=torch.full((TOKENS,), 77),
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


@pytest.mark.parametrize("width", [2, 9, 33])
def test_rows(width: int, device: str) -> None:
    rng = random.Random(width)
    parents, depths = trees(width)
    for rows in (1, 4, SLOTS):
        verified = [rng.random() < 0.7 for _ in range(rows)]
        counts = [rng.randint(1, min(width, 13)) for _ in range(rows)]
        starts = torch.tensor([0, *counts, *[0] * (SLOTS - rows)]).cumsum(0).to(torch.int32)
        slots = torch.randperm(SLOTS)[:rows]
        lengths = torch.randint(20, 90, (SLOTS,), dtype=torch.int32)
        given = parents, depths, slots, torch.tensor(verified), starts, lengths
        want, got = nonsense(width), nonsense(width)
        reference.lay_rows(want, *given)
        got = Rows(**{name: getattr(got, name).to(device) for name in Rows.__slots__})
        kernel.lay_rows(got, *(t.to(device) for t in given))
        for name in Rows.__slots__:
            assert torch.equal(getattr(want, name), getattr(got, name).cpu()), name
        offsets = [0] * TOKENS
        for r in range(rows):
            slot, first = int(slots[r]), int(starts[r])
            own = parents[slot].tolist() if verified[r] else list(range(-1, width - 1))
            assert want.row_parents[r].tolist() == own
            assert int(want.lengths[r]) == (int(lengths[r]) if verified[r] else 0)
            for node in range(counts[r]):
                offsets[first + node] = int(depths[slot, node]) - node if verified[r] else 0
        assert want.offsets.tolist() == offsets
        assert want.path.tolist() == [list(range(width))] * SLOTS
        assert not want.accepted.any()
        assert want.row_parents[rows:].tolist() == [list(range(-1, width - 1))] * (SLOTS - rows)


@pytest.mark.parametrize("width", [2, 9])
def test_order_of_paths(width: int, device: str) -> None:
    rng = random.Random(width)
    counts = [rng.randint(1, width) for _ in range(5)]
    starts, slots = torch.tensor([0, *counts]).cumsum(0).to(torch.int32), torch.tensor([3, 0, 8, 1, 5])
    path = torch.randint(0, width, (SLOTS, width), dtype=torch.int32)
    accepted = torch.zeros(SLOTS, dtype=torch.int32)
    accepted[slots] = torch.tensor([rng.randint(0, n) for n in counts], dtype=torch.int32)
    want, got = torch.arange(sum(counts)), torch.arange(sum(counts)).to(device)
    reference.path_order(want, path, accepted, slots, starts)
    kernel.path_order(got, *(t.to(device) for t in (path, accepted, slots, starts)))
    assert torch.equal(want, got.cpu())
    plain = list(range(sum(counts)))
    for r, slot in enumerate(slots.tolist()):
        for depth in range(int(accepted[slot])):
            plain[int(starts[r]) + depth] = int(starts[r]) + int(path[slot, depth])
    assert want.tolist() == plain
