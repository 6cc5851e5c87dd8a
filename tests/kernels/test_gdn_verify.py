"""Both variants of the verification kernel against the float64 definition, and what must hold bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels import cases
from tests.kernels.cases import Parents, chain, comb, depth_first, full, random_tree, star
from tests.kernels.checks import Variant, check_verify, rows_of, verify
from tests.kernels.close import assert_close, assert_same_bits
from thor_spec.errors import ConfigError
from thor_spec.kernels.gdn_common.record import Record
from thor_spec.kernels.gdn_verify.tiles import SOLVE_WARPS, Tiles, replay_tiles, wy_tiles
from thor_spec.kernels.tree_paths.reference import TreePaths

VARIANTS = pytest.mark.parametrize("variant", ["replay", "wy"])
FORESTS: dict[str, list[Parents]] = {
    "one node": [[-1]],
    "stars": [star(17), star(2)],
    "combs": [comb(33)],
    "full": [full([2, 2, 2]), full([3, 2])],
    "eight requests": [random_tree(n, n) for n in (1, 2, 3, 5, 8, 9, 12, 17)],
    "64 nodes": [random_tree(64, 7)],
    "depth first": [depth_first(random_tree(20, 2)), depth_first(comb(7))],
    "a forest": [[-1, 0, -1, 2, 1, -1]],
}
SHAPES = [(1, 1, 16, 16), (2, 4, 24, 20), (1, 3, 33, 17), (2, 2, 16, 40)]


@VARIANTS
@pytest.mark.parametrize("name", FORESTS)
def test_trees(name: str, variant: Variant, device: str) -> None:
    check_verify(cases.make(FORESTS[name], seed=len(name)), variant, device)


@VARIANTS
@pytest.mark.parametrize("nodes", [5, 20])
def test_a_launch_that_is_narrower_than_the_masks(nodes: int, variant: Variant, device: str) -> None:
    """As in a graph of fewer nodes than the engine's largest trees: a smaller kernel, the same rows of masks."""
    case = cases.make([random_tree(nodes, 3), star(4)])
    plain = verify(case.to(device), variant)
    paths = case.args["paths"]
    wide = torch.nn.functional.pad(paths.masks, (0, 40 - paths.masks.shape[1]))
    padded = replace(case, args={**case.args, "paths": TreePaths(masks=wide, leaves=paths.leaves)}).copy()
    narrow = padded.to(device)
    narrow.args["record"] = widened(narrow.record, 40)
    found = verify(narrow, variant, width=nodes)
    assert_same_bits("outputs", plain, found)


def widened(record: Record, rows: int) -> Record:
    """Return a record of more rows, which a narrower launch leaves alone."""
    more = {
        name: torch.nn.functional.pad(t, (0, 0) * (t.ndim - 2) + (0, rows - t.shape[1]))
        if isinstance(t := getattr(record, name), torch.Tensor) and t.ndim > 1
        else t
        for name in Record.__dataclass_fields__
    }
    return Record(**more)


@VARIANTS
@pytest.mark.parametrize("lengths", [[1], [16], [17, 3], [64]], ids=str)
def test_chains_without_masks(lengths: list[int], variant: Variant, device: str) -> None:
    check_verify(cases.make([chain(n) for n in lengths], tree=False), variant, device)


@VARIANTS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes(shape: tuple[int, int, int, int], variant: Variant, device: str) -> None:
    heads, value_heads, key_dim, value_dim = shape
    case = cases.make([random_tree(7, 1), chain(3)], heads=heads, value_heads=value_heads,
                      key_dim=key_dim, value_dim=value_dim)  # fmt: skip
    check_verify(case, variant, device)


@VARIANTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype, state_dtype: torch.dtype, variant: Variant, device: str) -> None:
    case = cases.make([random_tree(18, 3)], dtype=dtype, state_dtype=state_dtype, gate_dtype=dtype)
    check_verify(case, variant, device)


@VARIANTS
def test_real_head_dims(variant: Variant, device: str) -> None:
    case = cases.make([random_tree(17, 3)], key_dim=128, value_dim=128, value_heads=1, gate_dtype=torch.bfloat16)
    check_verify(case, variant, device, tiles=Tiles(block_v=32, warps=4))


@VARIANTS
@pytest.mark.parametrize("mode", ["no delta", "no norm", "no beta"])
def test_modes(mode: str, variant: Variant, device: str) -> None:
    case = cases.make([random_tree(19, 4), star(3)], has_beta=mode != "no beta")
    if mode == "no norm":
        case.args["k"].mul_(0.1)
    check_verify(case, variant, device, delta=mode != "no delta", l2_norm=mode != "no norm")


def test_per_channel_decay(device: str) -> None:
    case = cases.make([random_tree(11, 4), star(3)], per_channel=True)
    check_verify(case, "replay", device)
    with pytest.raises(ConfigError, match="no stable product form"):
        verify(case.to(device), "wy")


@pytest.mark.parametrize("tiles", [{"parts": 2}, {"parts": 2, "tf32": True}], ids=str)
@pytest.mark.parametrize("name", ["64 nodes", "combs"])
def test_other_products_hold_the_budget(name: str, tiles: dict[str, Any], device: str) -> None:
    case = cases.make(FORESTS[name], key_dim=64)
    check_verify(case, "wy", device, tiles=Tiles(block_v=16, warps=4, **tiles))


@pytest.mark.parametrize("factor", [1e6, 1e-7])
def test_values_that_float16_does_not_hold(factor: float, device: str) -> None:
    """Products of float16 see them in units of each row's largest; one row is zero."""
    case = cases.make([chain(18), random_tree(40, 5)], value_heads=1)
    case.args["v"].mul_(factor)[..., 3] = 0
    case.state.mul_(factor)[..., 3, :] = 0
    check_verify(case, "wy", device)


def test_products_of_nodes_that_float16_does_not_hold(device: str) -> None:
    case = cases.make([chain(18)])
    for name in "qk":
        case.args[name].mul_(300)
    check_verify(case, "wy", device, delta=False, l2_norm=False)


def test_more_or_fewer_parts_are_refused() -> None:
    for parts in (0, 1, 4):
        with pytest.raises(ConfigError, match="parts"):
            Tiles(block_v=16, warps=4, parts=parts)


GATES: dict[str, dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "forgets at once": {"decays": lambda a: a * 0 + 60.0},
    "never forgets": {"decays": lambda a: a * 0 - 60.0},
    "now and then": {"decays": lambda a: torch.where(a > 0.5, 60.0, -5.0)},
    "a thousand nats": {"decays": lambda a: torch.where(a > 0, 40.0, -9.0)},
    "beta 0": {"betas": lambda b: b * 0 - 200.0},
    "beta 1": {"betas": lambda b: b * 0 + 200.0},
}


@VARIANTS
@pytest.mark.parametrize("name", GATES)
def test_extreme_gates(name: str, variant: Variant, device: str) -> None:
    gates: Any = GATES[name]
    check_verify(cases.make([chain(40), random_tree(33, 5)], value_heads=1, **gates), variant, device)


@VARIANTS
def test_repeated_keys_write_at_full_strength(variant: Variant, device: str) -> None:
    """The triangular system's worst case: its inverse stays small, its powers do not."""
    case = cases.make([chain(32)], decays=lambda a: a * 0 - 60.0, betas=lambda b: b * 0 + 200.0, dtype=torch.float32)
    case.args["k"][:] = case.args["k"][:1].clone()
    check_verify(case, variant, device)


@VARIANTS
def test_padding_rows_are_skipped(variant: Variant, device: str) -> None:
    case = cases.make([random_tree(5, 1), chain(4), star(3)], padding=[0, 2])
    for r in (0, 2):
        bos, end = case.args["cu_nodes"][r], case.args["cu_nodes"][r + 1]
        case.args["k"][bos:end] = torch.nan
    case.args["state_indices"][2] = -1
    check_verify(case, variant, device)


@VARIANTS
def test_state_slots_of_nobody_are_not_even_read(variant: Variant, device: str) -> None:
    case = cases.make([random_tree(9, 1), chain(4)])
    used = case.args["state_indices"].tolist()
    for slot in range(len(case.state)):
        if slot not in used:
            case.state[slot] = torch.nan
    check_verify(case, variant, device)


@VARIANTS
def test_requests_without_nodes_and_with_too_many(variant: Variant, device: str) -> None:
    case = cases.make([chain(3), chain(6)], tree=False).to(device)
    case.args["cu_nodes"] = torch.tensor([0, 0, 9], dtype=torch.int32, device=device)  # 9 nodes, room for 6
    got = torch.full(case.args["v"].shape, torch.nan, device=device)
    from thor_spec.kernels.gdn_verify import kernel

    kernel.gdn_verify(**case.args, variant=variant, out=got)
    assert got[:6].isfinite().all()
    assert got[6:].isnan().all()


@VARIANTS
def test_tree_of_one_branch_is_a_chain_bit_for_bit(variant: Variant, device: str) -> None:
    tree = cases.make([chain(19), chain(2)], seed=3).to(device)
    plain = tree.copy()
    plain.args["paths"] = None
    assert_same_bits("output", verify(plain, variant), verify(tree, variant))
    for name in ("u", "k", "k_scale", "log_decay"):
        assert_same_bits(name, rows_of(plain, getattr(plain.record, name)), rows_of(tree, getattr(tree.record, name)))


def test_walkers_do_not_change_replay(device: str) -> None:
    case = cases.make([comb(9), full([2, 2])], key_dim=128 if device == "cuda" else 16, value_dim=32).to(device)
    want = verify(case.copy(), "replay", tiles=Tiles(block_v=32, warps=4))
    for walkers in (2, 4, 8):
        tiles = Tiles(block_v=32, warps=4, walkers=walkers)
        assert_same_bits(str(tiles), want, verify(case.copy(), "replay", tiles=tiles))


def test_order_of_nodes_does_not_change_replay(device: str) -> None:
    """Siblings swapped, or numbered depth first: the same node computes the same bits."""
    breadth = full([2, 2, 2])
    case = cases.make([breadth], seed=9)
    order = [0, 2, 1, 6, 5, 4, 3, 14, 13, 12, 11, 10, 9, 8, 7]
    other = cases.make([breadth], seed=9)
    for name in ("q", "k", "v", "a", "b"):
        other.args[name] = other.args[name][order].clone()
    want, got = verify(case.to(device), "replay"), verify(other.to(device), "replay")
    assert_same_bits("output", want[order], got)


@VARIANTS
def test_bfloat16_outputs_round_once(variant: Variant, device: str) -> None:
    case = cases.make([random_tree(12, 2)]).to(device)
    exact = verify(case.copy(), variant)
    out = torch.empty(case.args["v"].shape, dtype=torch.bfloat16, device=device)
    from thor_spec.kernels.gdn_verify import kernel

    kernel.gdn_verify(**case.args, variant=variant, out=out)
    assert_close("output", exact, out.float(), budget=2**-8)


def test_wrong_shapes_are_refused() -> None:
    case = cases.make([chain(3)])
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("same tokens", {"q": case.args["q"][:2]}),
        ("each slot contiguous", {"state": case.state.transpose(2, 3)}),
        ("a must be contiguous", {"a": case.args["a"][:, :1]}),
        ("entries of cu_nodes", {"cu_nodes": case.args["cu_nodes"][:1]}),
        ("width=65", {"width": 65}),
        ("only the first dimension", {"k": case.args["k"].transpose(1, 2).contiguous().transpose(1, 2)}),
    ]
    from thor_spec.kernels.gdn_verify import kernel

    case.args["k"] = torch.cat([case.args["k"]] * 2, dim=1)  # two heads, or every layout is contiguous
    case = cases.make([chain(3)], heads=2)
    wrong[0][1]["q"] = case.args["q"][:2]
    wrong[5][1]["k"] = case.args["k"].transpose(1, 2).contiguous().transpose(1, 2)
    for text, change in wrong:
        with pytest.raises(ConfigError, match=f"(?i){text}"):
            kernel.gdn_verify(**{**case.args, **change})
    deferred = cases.make([chain(3)], deferred=True)
    with pytest.raises(ConfigError, match="Several walkers"):
        kernel.gdn_verify(**deferred.args, tiles=Tiles(block_v=16, warps=4, walkers=2))
    for name in ("block_v", "warps", "walkers", "solve_warps"):
        with pytest.raises(ConfigError, match=f"tiles.{name}=24 must be a power of two"):
            Tiles(**{"block_v": 16, "warps": 4, name: 24})


def test_tables_fill_small_devices_and_large_ones() -> None:
    def replay(heads: int, *, dim: int = 128, sms: int = 132, tree: bool = False) -> Tiles:
        return replay_tiles(heads=heads, value_dim=dim, tree=tree, deferred=False, sms=sms)

    # The rows of a tile belong to bit-identity with vLLM; only leaves may be shared out.
    assert replay(32) == replay(2048, tree=True) == Tiles(block_v=32, warps=4)
    assert replay(32, dim=16) == Tiles(block_v=16, warps=4)
    assert replay(32, tree=True, sms=20).walkers == 1
    assert replay(8, tree=True) == Tiles(block_v=32, warps=4, walkers=8)


def test_table_of_the_closed_form() -> None:
    def wy(requests: int, *, dim: int = 128, block: int = 16, sms: int = 132) -> Tiles:
        return wy_tiles(heads=32 * requests, value_dim=dim, block=block, sms=sms)

    assert [wy(1, dim=dim).block_v for dim in (128, 17, 8)] == [64, 32, 16]
    assert wy(1) == wy(8) == Tiles(block_v=64, warps=4, parts=3)
    assert wy(64) == wy(8, sms=20) == wy(1, block=32) == wy(8, block=64) == Tiles(block_v=64, warps=4, parts=2)
    assert [SOLVE_WARPS[block] for block in (16, 32, 64)] == [1, 2, 4]
