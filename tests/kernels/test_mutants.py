"""Every line that matters is missed when it is wrong: each of these faults must fail a check.

A fault is a replacement in a kernel's source. The changed file is imported, and its functions take the places of the
originals wherever those were imported. Faults stay inside their buffers: an interpreted kernel that leaves them takes
the test process with it.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction

import thor_spec.kernels
from tests.conftest import HAS_GPU
from tests.kernels import cases
from tests.kernels.cases import chain, comb, random_tree
from tests.kernels.checks import ONE, Variant, as_tensors, check_commit, check_verify, verify
from tests.kernels.close import assert_close, assert_same_bits
from tests.kernels.mutants import imported
from thor_spec.kernels.gdn_commit import kernel as commit
from thor_spec.kernels.gdn_commit import reference
from thor_spec.kernels.gdn_verify import reference as verify_reference
from thor_spec.kernels.gdn_verify.tiles import Tiles
from thor_spec.kernels.tree_paths import kernel as tree_paths
from thor_spec.kernels.tree_paths import reference as tree_reference

pytestmark = pytest.mark.skipif(HAS_GPU, reason="not run: mutants are interpreted")
ROOT = Path(thor_spec.kernels.__file__).parent
COMMON, REPLAY, WY = "gdn_common", "gdn_verify/replay", "gdn_verify/wy"


def trees(variant: Variant) -> None:
    check_verify(
        cases.make([comb(19), [-1, 0, 0], [-1, 0, 1, 1, 0]], heads=2, value_heads=4, padding=[1], seed=3),
        variant,
        "cpu",
    )


def small_keys(variant: Variant) -> None:
    case = cases.make([chain(3)], seed=1)
    case.args["k"].mul_(1e-3)
    case.args["q"].mul_(1e-3)
    check_verify(case, variant, "cpu")


def steep(variant: Variant) -> None:
    """Decays whose running totals have no digits left for what follows."""
    case = cases.make([chain(33)], value_heads=1, decays=lambda a: torch.where(a > 0.3, 999.0, -4.0))
    case.args["A_log"].zero_()
    check_verify(case, variant, "cpu")


def endless(variant: Variant) -> None:
    """Decays of which a few are more than float32 counts in 64ths."""
    case = cases.make([chain(33)], value_heads=1, decays=lambda a: torch.where(a > 0.3, 3e5, -2.0))
    check_verify(case, variant, "cpu")


def far_apart(variant: Variant) -> None:
    """Branches whose decays differ by more than an exponential holds."""
    case = cases.make([[-1, 0, 0, 1, 2]], value_heads=1)
    case.args["A_log"].zero_()
    case.args["a"][:, 0] = torch.tensor([-3.0, -3.0, 400.0, -3.0, -3.0])
    check_verify(case, variant, "cpu")


def linear_softplus(variant: Variant) -> None:
    check_verify(cases.make([chain(2)], decays=lambda a: a * 0 + 100.0), variant, "cpu")


def walkers(_: Variant) -> None:
    case = cases.make([comb(9)], value_dim=16)
    want = verify(case.copy(), "replay")
    assert_same_bits("output", want, verify(case, "replay", tiles=Tiles(block_v=16, warps=4, walkers=2)))


def float32(variant: Variant) -> None:
    check_verify(cases.make([chain(4)], dtype=torch.float32, key_dim=32), variant, "cpu")


def two_blocks(variant: Variant) -> None:
    check_verify(cases.make([chain(30)], tree=False), variant, "cpu")


def three_blocks(variant: Variant) -> None:
    """Keys alike and nothing forgotten: what is two blocks up still counts."""
    case = cases.make([chain(46)], tree=False, decays=lambda a: a * 0 - 60.0, betas=lambda b: b * 0 + 200.0)
    case.args["k"].mul_(0.3).add_(1.0)
    check_verify(case, variant, "cpu")


def one_branch(variant: Variant) -> None:
    check_verify(cases.make([chain(18)], tree=False), variant, "cpu")


def large(variant: Variant) -> None:
    """Values that float16 does not hold."""
    case = cases.make([chain(18)], value_heads=1)
    case.args["v"].mul_(1e6)
    check_verify(case, variant, "cpu")


def committed(variant: Variant) -> None:
    check_commit(cases.make([comb(7), random_tree(20, 2)], heads=2, value_heads=2, padding=[]), variant, "cpu", seed=4)


def deferred(variant: Variant) -> None:
    """Two steps with a flush, against a commit at once."""
    now = cases.make([comb(5)], seed=2, state_dtype=torch.bfloat16)
    later = cases.make([comb(5)], seed=2, state_dtype=torch.bfloat16, deferred=True)
    path, accepted = as_tensors([[0, 2, 4]], "cpu")
    where = now.args["state_indices"], now.args["record_indices"]
    for _ in range(4):  # twice around the ring
        want, got = verify(now, variant), verify(later, variant)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        commit.gdn_commit(now.state, where[0], now.record, where[1], path, accepted, tiles=ONE)
        copy = later.copy().record
        for module, record in ((reference, copy), (commit, later.record)):
            module.gdn_compact(record, *where, path, accepted)
            module.gdn_advance(record, *where, accepted, period=1)
        assert torch.equal(copy.pending, later.record.pending)
        assert torch.equal(copy.flush, later.record.flush)
        assert torch.equal(copy.start, later.record.start)
        rec = int(where[1][0])
        rows = copy.ring(rec, range(int(copy.pending[rec])))
        assert_same_bits("u", copy.u[rec, rows], later.record.u[rec, rows])


def exactly(variant: Variant) -> None:
    """What the third part of a state is for: the budget alone would do with two."""
    case = cases.make([chain(2)], key_dim=64, value_dim=64, value_heads=1)
    want = torch.full(case.args["v"].shape, torch.nan, dtype=torch.float64)
    verify_reference.gdn_verify(**case.in_float64().args, out=want)
    assert_close("output", want, verify(case, variant), budget=5e-7)


def long_deferred(_: Variant) -> None:
    """More pending rows than one product takes, against the same rows committed."""
    case = cases.make([chain(20)], deferred=True, period=1, tree=False)
    verify(case, "wy")
    where = case.args["state_indices"], case.record, case.args["record_indices"]
    twenty = torch.tensor([20], dtype=torch.int32)
    now = case.copy()
    commit.gdn_commit(now.state, where[0], now.record, where[2], None, twenty, method="product", tiles=ONE)
    commit.gdn_advance(case.record, where[0], where[2], twenty, period=1)
    assert_close("output", verify(now, "wy"), verify(case, "wy"))
    assert_close("state", now.state, case.state)


def masks(_: Variant) -> None:
    parents = torch.tensor([comb(19), [-1, 9, *range(1, 18)]], dtype=torch.int32)
    cu = torch.tensor([0, 19, 30], dtype=torch.int32)
    want, got = (module.tree_paths(parents, cu) for module in (tree_reference, tree_paths))
    assert torch.equal(want.masks, got.masks)
    assert torch.equal(want.leaves, got.leaves)


MUTANTS: list[tuple[str, str, str, Callable[[Variant], None], Variant]] = [
    (COMMON, "-tl.exp(A_log)", "-A_log", trees, "replay"),
    (COMMON, "x <= 20.0", "x <= 2000.0", linear_softplus, "replay"),
    (COMMON, "- 127\n", "- 127 & 62\n", trees, "replay"),
    (COMMON, "path + ahead", "path + i", committed, "replay"),
    (COMMON, "at = offset + ahead", "at = offset + i", deferred, "replay"),
    (COMMON, "o_i[None, :] > o_i[:, None]", "o_i[None, :] >= o_i[:, None]", committed, "wy"),
    (COMMON, "h = h * tl.exp(tl.sum(g, axis=0))", "h = h * 1.0", committed, "wy"),
    (COMMON, "(tl.exp(after) * scale)", "tl.exp(after)", committed, "wy"),
    (COMMON, "acc = _dot(middle, y, acc, WIDEN)", "acc = acc", trees, "wy"),
    (COMMON, "acc = _dot(low, y, acc, WIDEN)", "acc = acc", exactly, "wy"),
    (COMMON, "rest = x - high", "rest = x", trees, "wy"),
    (COMMON, "acc = _dot(high, y_middle, acc, WIDEN)", "acc = acc", float32, "wy"),
    (REPLAY, "i_h = i_hv // (HV // H)", "i_h = i_hv % H", trees, "replay"),
    (REPLAY, "if slot <= 0:", "if slot < -5:", trees, "replay"),
    (REPLAY, "b_v -= tl.sum(h * b_k[None, :], 1)", "b_v -= tl.sum(h * b_q[None, :], 1)", trees, "replay"),
    (REPLAY, "h = decay(h, tl.exp(g), PER_CHANNEL)", "h = decay(h, g, PER_CHANNEL)", trees, "replay"),
    (REPLAY, "tl.sum(b_k * b_k) + 1e-6", "tl.sum(b_k * b_k) + 1e-5", small_keys, "replay"),
    (REPLAY, "b_q = b_q * scale\n", "b_q = b_q * 1.0\n", trees, "replay"),
    (REPLAY, "beaten = path & done", "beaten = path", trees, "replay"),
    (REPLAY, "reuse = (branch_path & ~beaten) == 0", "reuse = branch_path != 0", trees, "replay"),
    (REPLAY, "h = tl.where(reuse, branch, start)", "h = branch", trees, "replay"),
    (REPLAY, "branch = h\n", "branch = start\n", trees, "replay"),
    (REPLAY, "for _before in range(walker)", "for _before in range(0)", walkers, "replay"),
    (REPLAY, "tl.static_range(WALKERS)", "tl.static_range(WALKERS + 1)", walkers, "replay"),
    (REPLAY, "tl.minimum(t + 1, count - 1)", "t", one_branch, "replay"),
    (REPLAY, "i_hv % (HV // H) == 0", "i_hv == 0", trees, "replay"),
    (REPLAY, "offset = wrap(offset + kept, rows)", "offset = offset", deferred, "replay"),
    (COMMON, "tl.where(offset >= rows, offset - rows, offset)", "tl.minimum(offset, rows - 1)", deferred, "replay"),
    (REPLAY, "start = rounded.to(tl.float32)", "start = start + 0.0", deferred, "replay"),
    (WY, "if (slot <= 0) | (count <= 0):", "if (slot < -5) | (count <= 0):", trees, "wy"),
    (WY, "_inverse(tl.where(t[:, None] == t[None, :], 0.0, A), BW,", "_inverse(A, BW,", trees, "wy"),
    (WY, "tl.where(diagonal, 0.0, blocks)", "blocks", two_blocks, "wy"),
    (WY, "X -= dot_small(M, X", "X += dot_small(M, X", two_blocks, "wy"),
    (WY, "if BLOCKS > 2:", "if BLOCKS > 4:", three_blocks, "wy"),
    (WY, "square = dot_small(M, M,", "square = dot_small(M, X,", three_blocks, "wy"),
    (WY, "for i in range(15):", "for i in range(14):", one_branch, "wy"),
    (WY, "T -= below", "T += below", trees, "wy"),
    (WY, "exponent = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])",
     "exponent = (coarse + fine)[:, None] - (coarse + fine)[None, :]", steep, "wy"),
    (WY, "tl.maximum(g, -1024.0)", "g", endless, "wy"),
    (WY, 'tl.exp(tl.where(on_path, exponent, float("-inf")))', "tl.exp(exponent) * on_path", far_apart, "wy"),
    (WY, "nothing, PARTS, WIDEN) * fade_k[None, :]", "nothing, PARTS, WIDEN)", trees, "wy"),
    (WY, "fold_rows_by_product(h, 16,", "fold_rows_by_product(h, 32,", long_deferred, "wy"),
    (WY, "tl.load(factors + (head * 2 + 1) * BW + t)", "tl.load(factors + head * 2 * BW + t)", trees, "wy"),
    (WY, "t[None, :] * BW + t[:, None]  # transposed", "t[:, None] * BW + t[None, :]", trees, "wy"),
    (WY, "X * beta[None, :]", "X", trees, "wy"),
    (WY, "seen * beta[None, :]", "seen", trees, "wy"),
    (WY, "(beta * k_scale)[:, None]", "k_scale[:, None]", trees, "wy"),
    (WY, "dot_of_inputs(b_q, b_k, WIDEN) * D * q_scale[:, None]", "dot_of_inputs(b_q, b_k, WIDEN) * D", trees, "wy"),
    (WY, "o += dot_small(", "o = u + dot_small(", trees, "wy"),
    (WY, "(size * scale)", "size", trees, "wy"),
    (WY, "r *= inverse[:, None]", "size = size * 0 + 1.0", large, "wy"),
    (COMMON, "acc = _dot(x_low, y_high, acc, WIDEN)", "acc = acc", trees, "wy"),
    (COMMON, "acc = _dot(x_high, y_low, acc, WIDEN)", "acc = acc", trees, "wy"),
    (WY, "(tl.full(t.shape, 2, tl.int64) << t.to(tl.int64)) - 1", "(tl.full(t.shape, 1, tl.int64) << t.to(tl.int64)) - 1",
     one_branch, "wy"),
    (WY, "offset = wrap(offset + kept, rows)", "offset = offset", deferred, "wy"),
    (WY, "wrap(tl.load(start_row + rec) + tl.load(pending + rec), rows)", "tl.load(start_row + rec)", deferred, "wy"),
    (WY, "h = rounded.to(tl.float32)", "h = h + 0.0", deferred, "wy"),
    ("gdn_commit", "now = tl.where(flushed, 0, first)", "now = tl.where(flushed, first, first)", deferred, "replay"),
    ("gdn_commit", "tl.where(flushed, wrap(start + first, rows), start)", "start", deferred, "replay"),
    ("gdn_commit", "wrap(first + node, rows)", "wrap(first + i, rows)", deferred, "replay"),
    ("gdn_commit", "now >= period", "now > period + 5", deferred, "replay"),
    ("gdn_commit", "fold_rows(h, slab, rows, behind, count, path", "fold_rows(h, slab, rows, behind, count - 1, path", committed, "replay"),
    ("gdn_commit", "fold_rows_by_product(h, 0, slab, rows, behind, count, path", "fold_rows_by_product(h, 0, slab, rows, behind, count - 1, path",
     committed, "wy"),
    ("tree_paths", "while span < BT:", "while span < 4:", masks, "wy"),
    ("tree_paths", "(parent < t), parent", "(parent < 64), parent", masks, "wy"),
    ("tree_paths", "own & (inner == 0)", "own", masks, "wy"),
]  # fmt: skip


def functions(module: object) -> dict[str, object]:
    return {name: f for name, f in vars(module).items() if isinstance(f, JITFunction | InterpretedFunction)}


def put_in_place(folder: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import ``source`` as a module and let its Triton functions replace those of the original, everywhere."""
    name = "thor_spec.kernels." + folder.replace("/", ".") + ".kernel"
    original = importlib.import_module(name)
    mutant = imported(source, tmp_path)
    own = {f: key for key, f in functions(original).items() if f.fn.__module__ == name}  # type: ignore[attr-defined]
    for module in [m for key, m in sys.modules.items() if key.startswith("thor_spec.kernels")]:
        for key, function in functions(module).items():
            if function in own:
                monkeypatch.setattr(module, key, getattr(mutant, own[function]))


@pytest.mark.parametrize(
    ("folder", "old", "new", "check", "variant"), MUTANTS, ids=[f"{m[0]}: {m[1][:40].strip()}" for m in MUTANTS]
)
def test_mutant_is_caught(
    folder: str, old: str, new: str, check: Callable[[Variant], None], variant: Variant,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    source = (ROOT / folder / "kernel.py").read_text(encoding="utf-8")
    assert old in source, "the line is gone: change this list with the kernel"
    put_in_place(folder, source.replace(old, new), tmp_path, monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        check(variant)


CHECKS = sorted({(m[3].__name__, m[4]) for m in MUTANTS})


@pytest.mark.parametrize(("name", "variant"), CHECKS, ids=str)
def test_original_passes_through_the_same_door(
    name: str, variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the mutants could fail for what was done to them, not for their fault."""
    for folder in (COMMON, REPLAY, WY, "gdn_commit", "tree_paths"):
        put_in_place(folder, (ROOT / folder / "kernel.py").read_text(encoding="utf-8"), tmp_path, monkeypatch)
    next(m[3] for m in MUTANTS if m[3].__name__ == name)(variant)
