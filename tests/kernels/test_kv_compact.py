"""Compaction against its definition, on every dtype a cache may have, and with what must fail."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.kernels.cases import chain, depth_first, path_to, random_tree, star
from tests.kernels.close import assert_same_bits
from tests.kernels.mutants import mutant
from thor_spec.errors import ConfigError
from thor_spec.kernels.kv_compact import kernel, reference

SIZE, HEADS, DIM = 7, 2, 24


def caches(dtype: torch.dtype, *, layers: int = 3, blocks: int = 25, dim: int = DIM) -> list[torch.Tensor]:
    """Key and value buffers of some layers, interleaved as vLLM keeps them; the first block lies before the cache."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(layers):
        bits = torch.randint(-(2**7), 2**7, (blocks, 2, SIZE, HEADS, dim * dtype.itemsize), generator=generator)
        both = bits.to(torch.int8).view(dtype)
        found += [both[:, 0], both[:, 1]]
    return found


def batch(trees: list[list[int]], leaves: list[int], device: str) -> dict[str, torch.Tensor]:
    """Slots in random blocks, with the nodes right behind a context of any length."""
    generator = torch.Generator().manual_seed(len(trees))
    blocks = iter((1 + torch.randperm(23, generator=generator)).tolist())
    slots = []
    for r, tree in enumerate(trees):
        context = 3 + 2 * r
        table = [next(blocks) for _ in range((context + len(tree)) // SIZE + 1)]
        slots += [table[(context + t) // SIZE] * SIZE + (context + t) % SIZE for t in range(len(tree))]
    paths = [path_to(tree, leaf) if leaf >= 0 else [] for tree, leaf in zip(trees, leaves, strict=True)]
    path = torch.full((len(trees), 64), 1 << 20, dtype=torch.int32)
    for r, nodes in enumerate(paths):
        path[r, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
    made = {
        "slots": torch.tensor(slots, dtype=torch.int64),
        "cu_nodes": torch.tensor([0, *torch.tensor([len(t) for t in trees]).cumsum(0).tolist()], dtype=torch.int32),
        "path": path,
        "accepted": torch.tensor([len(nodes) for nodes in paths], dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


TREES = {
    "chain": ([chain(9)], [8]),
    "nothing accepted": ([chain(9)], [-1]),
    "star": ([star(12)], [11]),
    "mixed": ([random_tree(17, 1), star(3), chain(1), depth_first(random_tree(30, 2))], [16, 2, 0, 23]),
    "64": ([random_tree(64, 3)], [63]),
}


def check(module: ModuleType, args: dict[str, torch.Tensor], dtype: torch.dtype, device: str, **options: Any) -> None:
    want, got = caches(dtype, **options), [buffer.to(device) for buffer in caches(dtype, **options)]
    reference.kv_compact([buffer[1:] for buffer in want], **{name: tensor.cpu() for name, tensor in args.items()})
    module.kv_compact(module.Buffers.of([buffer[1:] for buffer in got]), **args)
    for old, new in zip(want, got, strict=True):
        assert_same_bits("cache", old.contiguous().view(torch.int16), new.cpu().contiguous().view(torch.int16))


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_entries_of_a_path_move_to_a_chains_slots(name: str, dtype: torch.dtype, device: str) -> None:
    check(kernel, batch(*TREES[name], device), dtype, device)


def test_padding_moves_nothing(device: str) -> None:
    args = batch(*TREES["mixed"], device)
    args["slots"][17:] = -1
    check(kernel, args, torch.bfloat16, device)


def test_scales_are_buffers_of_one_element(device: str) -> None:
    check(kernel, batch(*TREES["mixed"], device), torch.float32, device, dim=1)


@pytest.mark.parametrize("seed", range(20))
def test_random_trees(seed: int, device: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 20, (3,), generator=generator).tolist()
    leaves = [int(torch.randint(-1, size, (1,), generator=generator)) for size in sizes]
    check(kernel, batch([random_tree(n, seed + n) for n in sizes], leaves, device), torch.bfloat16, device, layers=1)


def test_buffers_of_two_layouts_need_two_tables() -> None:
    with pytest.raises(ConfigError, match="one table per layout"):
        kernel.Buffers.of([*caches(torch.bfloat16), torch.zeros(4, SIZE, HEADS, DIM)])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.load(slots + first + node)", "tl.load(slots + first + depth)"),  # nothing moves
        ("tl.load(slots + first + depth)", "tl.load(slots + first + depth + 1)"),
        ("source % SLOTS * SLOT_STRIDE", "target % SLOTS * SLOT_STRIDE"),
        ("tl.load(addresses + tl.program_id(2))", "tl.load(addresses)"),  # one layer only
        ("(at // D).to(tl.int64) * HEAD_STRIDE + at % D", "(at % D).to(tl.int64)"),
        (" & (target >= 0) & (source >= 0)", ""),
        ("tl.load(accepted + i_r).to(tl.int32)", "tl.load(accepted + i_r).to(tl.int32) - 1"),
    ],
)
def test_mutants_fail(old: str, new: str, device: str, tmp_path: Path) -> None:
    args = batch(*TREES["mixed"], device)
    if "target >= 0" in old:
        args["slots"][0] = -1
        args["path"][0, 0] = 1
    with pytest.raises(AssertionError, match="cache"):
        check(mutant(kernel, old, new, tmp_path), args, torch.bfloat16, device)
