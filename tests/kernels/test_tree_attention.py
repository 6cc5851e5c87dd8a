"""Tree attention: against its float64 definition, at every edge of a launch, and with what must fail."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.kernels.cases import chain, comb, depth_first, full, path_to, random_tree, star
from tests.kernels.close import assert_close, assert_same_bits
from tests.kernels.mutants import mutant
from thor_spec.errors import ConfigError
from thor_spec.kernels.tree_attention import kernel, reference
from thor_spec.kernels.tree_attention.tiles import WAVES, Tiles
from thor_spec.kernels.tree_paths.reference import tree_paths

BUDGET = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # weights and outputs are rounded to bfloat16
WHOLE = Tiles(rows=16, slots=16, splits=1, warps=4)
SPLIT = Tiles(rows=16, slots=16, splits=9, warps=4, least=1)
_RIGHT: dict[tuple[Any, ...], torch.Tensor] = {}
BATCHES = {
    "one node": ([chain(1)], [0]),
    "chain": ([chain(16)], [37]),
    "star": ([star(9)], [15]),
    "full": ([full((3, 3))], [64]),
    "mixed": ([random_tree(17, 1), chain(1), depth_first(random_tree(11, 2))], [5, 50, 0]),
    "64": ([random_tree(64, 3)], [21]),
}


def case(trees: list[list[int]], contexts: list[int], device: str = "cpu", *, dtype: torch.dtype = torch.float32,
         heads: tuple[int, int] = (4, 2), dim: int = 16, size: int = 21, seed: int = 0) -> dict[str, Any]:  # fmt: skip
    """Arguments of ``tree_attention``: blocks in no order, and NaN in every slot that belongs to nobody."""
    g = torch.Generator().manual_seed(seed)
    hq, hkv = heads
    lengths = [context + len(tree) for tree, context in zip(trees, contexts, strict=True)]
    widest = max(map(len, trees))
    needed = [-(-length // size) for length in lengths]
    blocks = 1 + sum(needed)
    both = torch.full((blocks, 2, size, hkv, dim), torch.nan)
    order = iter((1 + torch.randperm(blocks - 1, generator=g)).tolist())
    table = torch.full((len(trees), max(needed) + 1), 0, dtype=torch.int32)
    for r, length in enumerate(lengths):
        for i in range(needed[r]):
            table[r, i] = next(order)
            used = min(size, length - i * size)
            both[table[r, i], :, :used] = torch.randn(2, used, hkv, dim, generator=g)
    parents = torch.full((len(trees), widest), -1, dtype=torch.int32)
    for r, tree in enumerate(trees):
        parents[r, : len(tree)] = torch.tensor(tree, dtype=torch.int32)
    cu_nodes = torch.tensor([0, *map(len, trees)]).cumsum(0).to(torch.int32)
    args = {
        "q": torch.randn(int(cu_nodes[-1]), hq, dim, generator=g).to(dtype),
        "keys": both[:, 0].to(dtype),
        "values": both[:, 1].to(dtype),
        "block_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "masks": tree_paths(parents, cu_nodes).masks,
        "cu_nodes": cu_nodes,
    }
    return {name: value.to(device) for name, value in args.items()} | {"scale": dim**-0.5}


def check(module: ModuleType, args: dict[str, Any], *, tiles: Tiles = WHOLE, **options: Any) -> torch.Tensor:
    on_cpu = {name: value.cpu() if torch.is_tensor(value) else value for name, value in args.items()}
    want = torch.full(on_cpu["q"].shape, torch.nan, dtype=torch.float64)
    reference.tree_attention(**{**on_cpu, "q": on_cpu["q"].double()}, out=want, **options)
    got = torch.full_like(args["q"], torch.nan)
    module.tree_attention(**args, tiles=tiles, width=args["masks"].shape[1], out=got, **options)
    written = ~want.isnan()
    assert got.cpu()[~written].isnan().all(), "output: a padding row was written"
    assert_close("output", want[written], got.cpu()[written], BUDGET[got.dtype])
    return got


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("tiles", [WHOLE, SPLIT], ids=["whole", "split"])
def test_against_the_definition(name: str, tiles: Tiles, device: str) -> None:
    check(kernel, case(*BATCHES[name], device), tiles=tiles)


@pytest.mark.parametrize(
    ("heads", "dim", "size"),
    [((1, 1), 16, 16), ((6, 2), 40, 5), ((8, 1), 64, 3), ((16, 2), 256, 48), ((2, 1), 24, 17)],
    ids=str,
)
def test_shapes(heads: tuple[int, int], dim: int, size: int, device: str) -> None:
    check(kernel, case([random_tree(6, 1), star(3)], [29, 2], device, heads=heads, dim=dim, size=size), tiles=SPLIT)


@pytest.mark.parametrize("tiles", [WHOLE, SPLIT], ids=["whole", "split"])
def test_bfloat16(tiles: Tiles, device: str) -> None:
    check(kernel, case(*BATCHES["mixed"], device, dtype=torch.bfloat16), tiles=tiles)


@pytest.mark.parametrize("window", [1, 2, 6, 40, 1000])
def test_windows_count_positions_not_slots(window: int, device: str) -> None:
    check(kernel, case(*BATCHES["mixed"], device), tiles=SPLIT, window=window)


def behind_the_window(module: ModuleType, window: int, device: str) -> None:
    args = case([chain(5), chain(1)], [40, 37], device)
    size = args["keys"].shape[1]
    for r, context in enumerate((40, 37)):
        for slot in range(context + 1 - window):
            block = int(args["block_table"][r, slot // size])
            args["keys"][block, slot % size] = args["values"][block, slot % size] = torch.nan
    for tiles in (WHOLE, SPLIT):
        assert module.tree_attention(**args, tiles=tiles, width=5, window=window).isfinite().all(), "output"


@pytest.mark.parametrize("window", [1, 20])
def test_blocks_behind_the_window_may_be_anybodys(window: int, device: str) -> None:
    behind_the_window(kernel, window, device)


@pytest.mark.parametrize("splits", [1, 7, 64])
def test_more_programs_than_slots(splits: int, device: str) -> None:
    tiles = Tiles(rows=16, slots=16, splits=splits, warps=4)
    check(kernel, case([chain(2), random_tree(5, 4)], [0, 30], device), tiles=tiles)


@pytest.mark.parametrize("least", [1, 3])
@pytest.mark.parametrize("length", [16, 17, 47, 48, 49, 96, 97, 304])
def test_edges_of_shares(length: int, least: int, device: str) -> None:
    """Shares that end with the context, inside the drafts and behind them; more parts than a merge takes at a time."""
    tiles = Tiles(rows=16, slots=16, splits=3 if length < 300 else 20, warps=4, least=least)
    check(kernel, case([chain(9)], [length - 9], device, heads=(1, 1), size=40), tiles=tiles)


def test_a_sequence_is_cut_alike_in_any_company(device: str) -> None:
    """Same launch, other neighbours: not a bit of a request's rows changes."""
    args = case([random_tree(12, 5), star(12)], [70, 200], device)
    first = kernel.tree_attention(**args, tiles=SPLIT, width=12)[:12]
    args["seq_lens"][1] = 0
    assert_same_bits("rows", first, kernel.tree_attention(**args, tiles=SPLIT, width=12)[:12])


def test_padding_rows_are_skipped(device: str) -> None:
    args = case(*BATCHES["mixed"], device)
    args["seq_lens"][1] = 0
    for tiles in (WHOLE, SPLIT):
        check(kernel, args, tiles=tiles)


def test_a_chain_is_a_tree_of_one_branch_and_causal(device: str) -> None:
    args = case([chain(20)], [13], device)
    at_once = check(kernel, args)
    for n in (1, 7, 20):  # as a chain of n nodes, the last row is the same: nobody looks ahead
        part = {**args, "q": args["q"][:n].clone(), "seq_lens": torch.full_like(args["seq_lens"], 13 + n)}
        part["cu_nodes"] = torch.tensor([0, n], dtype=torch.int32, device=device)
        alone = kernel.tree_attention(**part, tiles=WHOLE, width=20)
        assert_close("row", at_once[n - 1].double(), alone[n - 1], BUDGET[torch.float32])


def test_each_path_is_a_sequence_of_its_own(device: str) -> None:
    """A node's row is that of the last token when its path alone is in the cache."""
    tree, context, size = random_tree(12, 8), 9, 7
    args = case([tree], [context], device, size=size)
    at_once = check(kernel, args)
    table = args["block_table"][0].long()

    def slot(i: int) -> tuple[int, int]:
        return int(table[i // size]), i % size

    for leaf in range(12):
        path = path_to(tree, leaf)
        keys, values = args["keys"].clone(), args["values"].clone()
        for depth, node in enumerate(path):
            keys[slot(context + depth)] = args["keys"][slot(context + node)]
            values[slot(context + depth)] = args["values"][slot(context + node)]
        n = len(path)
        alone = kernel.tree_attention(
            **{
                **args, "q": args["q"][path], "keys": keys, "values": values,
                "masks": torch.tensor([[(2 << t) - 1 for t in range(n)]], device=device),
                "seq_lens": torch.full_like(args["seq_lens"], context + n),
                "cu_nodes": torch.tensor([0, n], dtype=torch.int32, device=device),
            },
            tiles=WHOLE, width=n,
        )  # fmt: skip
        assert_close(f"node {leaf}", alone[-1].double(), at_once[leaf], BUDGET[torch.float32])


def test_eight_bit_caches_are_scaled(device: str) -> None:
    args = case(*BATCHES["mixed"], device)
    scales = {"key_scale": torch.tensor([0.5], device=device), "value_scale": torch.tensor([4.0], device=device)}
    for name, scale in zip(("keys", "values"), scales.values(), strict=True):
        args[name] = (args[name] / scale.item()).to(torch.float8_e4m3fn)
    got = torch.full_like(args["q"], torch.nan)
    kernel.tree_attention(**args, **scales, tiles=SPLIT, width=17, out=got)
    plain = {
        name: args[name].float() * scale.item() for name, scale in zip(("keys", "values"), scales.values(), strict=True)
    }
    want = check(kernel, {**args, **plain}, tiles=SPLIT)
    assert_close("output", want.double(), got, 1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int, device: str) -> None:
    g = torch.Generator().manual_seed(seed)
    sizes, contexts = torch.randint(1, 20, (3,), generator=g).tolist(), torch.randint(0, 60, (3,), generator=g).tolist()
    trees = [random_tree(n, seed + n) for n in sizes]
    tiles = Tiles(rows=16, slots=(16, 32)[seed % 2], splits=(1, 2, 4)[seed % 3], warps=4)
    check(kernel, case(trees, contexts, device, seed=seed), tiles=tiles, window=(None, 9)[seed % 2])


def test_parts_may_be_kept_and_hold_old_numbers(device: str) -> None:
    args = case(*BATCHES["mixed"], device)
    parts = kernel.Parts.allocate(200, 4, 16, SPLIT.splits, device)
    parts.acc.fill_(torch.nan)
    parts.total.fill_(7.0)
    parts.highest.fill_(100.0)
    want = check(kernel, args, tiles=SPLIT)
    assert_same_bits("output", want, kernel.tree_attention(**args, tiles=SPLIT, width=17, parts=parts))


def test_prompts_beside_trees_need_no_parts(device: str) -> None:
    """A prompt of thousands of tokens in the step would take gigabytes, which the engine's profile has not seen."""
    trees, contexts = [comb(12), chain(1)], [200, 31]
    alone = case(trees, contexts, device)
    want = kernel.tree_attention(**alone, tiles=SPLIT, width=12)
    prompt = torch.randn(300, *alone["q"].shape[1:], device=device, dtype=alone["q"].dtype)
    nodes = alone["cu_nodes"]
    beside = {
        **alone,
        "q": torch.cat((prompt, alone["q"])),
        "cu_nodes": torch.cat((nodes[:1], nodes + 300)),
        "seq_lens": torch.cat((torch.zeros_like(alone["seq_lens"][:1]), alone["seq_lens"])),
        "block_table": torch.cat((alone["block_table"][:1], alone["block_table"])),
        "masks": torch.cat((alone["masks"][:1], alone["masks"])),
    }
    parts = kernel.Parts.allocate(3 * 12, 4, alone["q"].shape[2], SPLIT.splits, device)
    assert_same_bits("output", want, kernel.tree_attention(**beside, tiles=SPLIT, width=12, parts=parts)[300:])


def test_what_does_not_fit_is_refused() -> None:
    args = case(*BATCHES["mixed"])
    for wrong in (
        {"width": 65},
        {"width": 18},
        {"q": args["q"][:, :3]},
        {"q": args["q"].transpose(1, 2).contiguous().transpose(1, 2)},
        {"key_scale": torch.ones(1)},
        {"parts": kernel.Parts.allocate(1, 4, 16, 4, "cpu")},
    ):
        with pytest.raises(ConfigError, match="tree_attention"):
            kernel.tree_attention(**{**args, "tiles": SPLIT, "width": 17, **wrong})


@pytest.mark.parametrize("sms", [20, 132])
@pytest.mark.parametrize("width", [1, 16, 64])
@pytest.mark.parametrize("requests", [1, 8, 70, 256])
def test_tiles_fill_the_device(sms: int, width: int, requests: int) -> None:
    tiles = Tiles.choose(width=width, group=8, requests=requests, kv_heads=2, max_slots=32768, sms=sms)
    for number in (tiles.rows, tiles.slots):
        assert number & (number - 1) == 0
    programs = -(-width * 8 // tiles.rows) * requests * 2 * tiles.splits
    resident = sms * (2 if tiles.rows <= 32 else 1)
    assert programs / (-(-programs // resident) * resident) >= 0.7, "little of the last wave is idle"
    assert tiles.splits == 1 or programs <= WAVES * resident, "parts would take much memory"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("((drafted < 0)[None, :] | (descends != 0))", "(drafted[None, :] < 64)"),  # no tree mask
        ("BD, BN, True,", "BD, BN, False,"),
        ("descends = (mask[:, None]", "descends = ((mask | mask >> 1)[:, None]"),  # causal
        ("context // BN * BN))", "context))"),
        ("context + _depth(of_key)", "s"),  # a node's slot taken for its position
        ("position[:, None] - window", "position[:, None] - window - 1"),
        ("tl.maximum(0, length - count + 1 - window)", "tl.maximum(0, length - count + 17 - window)"),
        ("total * keep + tl.sum", "total + tl.sum"),
        ("acc=acc * keep[:, None]", "acc=acc"),
        ("merged = merged * keep[:, None]", "merged = merged"),
        ("parts * weight[:, None]", "parts"),
        ("head_q = head * group + row % group", "head_q = head + (row % group) * HKV"),
        ("table = block_table + i_r * TABLE", "table = block_table"),
        ("inside = (i < used)[:, None] &", "inside = (i < 99)[:, None] &"),
        ("| (used == 1):", "| (used == 99):"),
        ("(i_r.to(tl.int64) * width + node)", "node"),  # requests in each other's parts
        ("(i_r.to(tl.int64) * width + t)", "t"),
        ("tl.cdiv(tiles, splits), LEAST", "tiles // splits, LEAST"),
        ("(length <= 0) |", "(length < 0) |"),
        ("start % SIZE + tl", "start % (SIZE - 1) + tl"),
        ("offset = s % SIZE", "offset = s % (SIZE - 1)"),
        ("block = tl.where(within >= SIZE", "block = tl.where(within > SIZE"),
        ("near, far = near_next, far_next", "near, far = near, far"),
        ("n = n + (n >> 8)", "n = n"),
    ],
)  # fmt: skip
def test_mutants_fail(old: str, new: str, device: str, tmp_path: Path) -> None:
    trees = [comb(12), chain(3), chain(1), depth_first(random_tree(5, 2))]
    args = case(trees, [20, 9, 260, 0], device, size=7 if "offset = s" in old else 21)
    args["seq_lens"][1] = 0
    with pytest.raises(AssertionError, match="output"):
        compare(mutant(kernel, old, new, tmp_path), args)


def test_a_slot_behind_the_last_of_64_nodes_is_not_seen(device: str, tmp_path: Path) -> None:
    module = mutant(kernel, "seen = live[None, :]", "seen = (s >= 0)[None, :]", tmp_path)
    with pytest.raises(AssertionError, match="output"):
        compare(module, case([chain(64)], [3], device, heads=(1, 1), dim=16))


def test_a_slot_behind_the_window_is_not_loaded(device: str, tmp_path: Path) -> None:
    module = mutant(kernel, "s > context - window", "s > context - window - 99", tmp_path)
    with pytest.raises(AssertionError, match="output"):
        behind_the_window(module, 20, device)


def compare(module: ModuleType, args: dict[str, Any]) -> None:
    """Run both modules in every kind of launch; what the right one gives is kept from mutant to mutant."""
    key = (args["keys"].shape, args["q"].shape)
    for tiles in (WHOLE, SPLIT):
        for window in (None, 3):
            if (*key, tiles, window) not in _RIGHT:
                _RIGHT[(*key, tiles, window)] = run(kernel, args, tiles, window)
            assert_same_bits("output", _RIGHT[(*key, tiles, window)], run(module, args, tiles, window))


def run(module: ModuleType, args: dict[str, Any], tiles: Tiles, window: int | None) -> torch.Tensor:
    _, heads, dim = args["q"].shape
    requests, width = args["masks"].shape
    parts = module.Parts.allocate(requests * width, heads, dim, tiles.splits, args["q"].device)
    parts.acc.fill_(torch.nan)
    out = torch.full_like(args["q"], torch.nan)
    module.tree_attention(**args, tiles=tiles, width=width, out=out, window=window, parts=parts)
    return out
