"""Commit, in its three forms: at once, fused into the next verification, and every L tokens."""

import random

import pytest
import torch

from tests.kernels import cases
from tests.kernels.cases import Case, chain, comb, path_to, random_tree, star
from tests.kernels.checks import METHOD, ONE, Variant, as_tensors, check_commit, rows_of, verify
from tests.kernels.close import assert_close, assert_same_bits
from thor_spec.errors import ConfigError
from thor_spec.kernels.gdn_commit import kernel, reference
from thor_spec.kernels.gdn_common.record import Record, rows_needed
from thor_spec.kernels.gdn_verify import reference as verify_reference

VARIANTS = pytest.mark.parametrize("variant", ["replay", "wy"])


@VARIANTS
@pytest.mark.parametrize(("seed", "nodes"), [(1, 33), (2, 9)])
def test_commit_equals_reference(seed: int, nodes: int, variant: Variant, device: str) -> None:
    case = cases.make([random_tree(nodes, seed), comb(5), chain(17), [-1]], seed=seed, padding=[1], heads=2,
                      value_heads=2, key_dim=24, value_dim=20)  # fmt: skip
    check_commit(case, variant, device, seed)


@VARIANTS
def test_bfloat16_state(variant: Variant, device: str) -> None:
    check_commit(cases.make([random_tree(9, 1)], state_dtype=torch.bfloat16), variant, device)


def test_per_channel_decay(device: str) -> None:
    case = cases.make([random_tree(9, 1)], per_channel=True)
    check_commit(case, "replay", device)
    with pytest.raises(ConfigError, match="not one product"):
        kernel.gdn_commit(
            case.state, case.args["state_indices"], case.record, case.args["record_indices"],
            None, torch.ones(1), method="product",
        )  # fmt: skip


@VARIANTS
def test_nothing_accepted_writes_nothing(variant: Variant, device: str) -> None:
    case = cases.make([chain(3)], state_dtype=torch.bfloat16).to(device)
    case.state.fill_(torch.nan)
    before = case.state.clone()
    kernel.gdn_commit(
        case.state, case.args["state_indices"], case.record, case.args["record_indices"],
        None, torch.zeros(1, dtype=torch.int32, device=device), method=METHOD[variant],
    )  # fmt: skip
    assert_same_bits("state", before, case.state)


def steps(case: Case, *, count: int, seed: int) -> list[tuple[Case, list[list[int]]]]:
    """Trees and accepted paths of a sequence of steps over the same slots; states and records are the first one's."""
    rng = random.Random(seed)
    rounds = []
    for i in range(count):
        fresh = cases.make(
            case.parents, seed=1000 * seed + i, key_dim=case.args["k"].shape[2], value_dim=case.args["v"].shape[2]
        )
        for name in ("state", "record", "state_indices", "record_indices", "A_log", "dt_bias"):
            fresh.args[name] = case.args[name]
        rounds.append((fresh, [path_to(p, rng.randrange(len(p))) for p in case.parents]))
    return rounds


def test_commit_then_decode_is_sequential_decoding_bit_for_bit(device: str) -> None:
    """Steps of trees, against one-token chains of the accepted tokens alone."""
    parents = [random_tree(7, 1), star(4), comb(6)]
    start = cases.make(parents, seed=5).to(device)
    ours, plain = start.copy(), start.copy()
    for i, (step, paths) in enumerate(steps(start, count=2, seed=3)):
        step = step.to(device)
        for name in ("state", "record"):
            step.args[name] = ours.args[name]
        got = verify(step, "replay")
        path, accepted = as_tensors(paths, device)
        kernel.gdn_commit(ours.state, step.args["state_indices"], ours.record, step.args["record_indices"], path,
                          accepted, tiles=ONE)  # fmt: skip
        decode(plain, step, paths, got)
        assert_same_bits(f"state after step {i}", plain.state, ours.state)


def decode(plain: Case, step: Case, paths: list[list[int]], outputs: torch.Tensor) -> None:
    """Decode the accepted tokens one at a time on ``plain``'s state and compare each output."""
    device = plain.state.device
    one = torch.ones(1, dtype=torch.int32, device=device)
    for r, nodes in enumerate(paths):
        for node in nodes:
            token = int(step.args["cu_nodes"][r]) + node
            single = Case(parents=[[-1]], args=dict(step.args), tree=False, counts=[1])
            for name in ("q", "k", "v", "a", "b"):
                single.args[name] = step.args[name][token : token + 1].contiguous()
            single.args |= {
                "state": plain.state, "record": plain.record, "paths": None,
                "state_indices": step.args["state_indices"][r : r + 1],
                "record_indices": step.args["record_indices"][r : r + 1],
                "cu_nodes": torch.tensor([0, 1], dtype=torch.int32, device=device),
            }  # fmt: skip
            got = verify(single, "replay")
            assert_same_bits(f"output of node {node}", got[0], outputs[token])
            kernel.gdn_commit(plain.state, single.args["state_indices"], plain.record, single.args["record_indices"],
                              None, one, tiles=ONE)  # fmt: skip


@VARIANTS
@pytest.mark.parametrize("period", [1, 4, 9])
def test_deferred_equals_immediate(period: int, variant: Variant, device: str) -> None:
    """Trees over several steps: the same outputs, and after a last flush the same states, whatever the period.

    Replay gives the same bits; the closed form rounds elsewhere. The state is written only when a flush is due.
    """
    parents = [random_tree(6, 1), comb(5)]
    now = cases.make(parents, seed=2).to(device)
    later = cases.make(parents, seed=2, deferred=True, period=period).to(device)
    for name in ("k", "k_scale", "u", "log_decay"):
        getattr(later.record, name).fill_(torch.nan)  # rows that nobody wrote must not matter
    assert later.record.rows == period - 1 + 6 + 6
    for step, paths in steps(now, count=4, seed=7):
        path, accepted = as_tensors(paths, device)
        step = step.to(device)
        step.args |= {"state": now.state, "record": now.record}
        want = verify(step, variant)
        kernel.gdn_commit(now.state, step.args["state_indices"], now.record, step.args["record_indices"], path,
                          accepted, method=METHOD[variant], tiles=ONE)  # fmt: skip
        due = later.record.flush[step.args["record_indices"].long()].cpu() != 0
        before = later.state.clone()
        step.args |= {"state": later.state, "record": later.record}
        got = verify(step, variant)
        slots = step.args["state_indices"].long()
        written = (before != later.state)[slots].flatten(1).any(1).cpu()
        assert torch.equal(written, due), "the state is written exactly when a flush is due"
        if variant == "replay":
            assert_same_bits("output", want, got)
        else:
            assert_close("output", want, got)
        bookkeeping(later, step, path, accepted, period)
    flush(later)
    if variant == "replay":
        assert_same_bits("state", now.state, later.state)
    else:
        assert_close("state", now.state, later.state)


def bookkeeping(case: Case, step: Case, path: torch.Tensor, accepted: torch.Tensor, period: int) -> None:
    """Compact and advance, and compare with the reference."""
    where = step.args["state_indices"], step.args["record_indices"]
    want = case.copy().record
    reference.gdn_compact(want, *where, path, accepted)
    kernel.gdn_compact(case.record, *where, path, accepted)
    reference.gdn_advance(want, *where, accepted, period=period)
    kernel.gdn_advance(case.record, *where, accepted, period=period)
    assert torch.equal(want.pending, case.record.pending)
    assert torch.equal(want.flush, case.record.flush)
    assert torch.equal(want.start, case.record.start)
    for rec, kept in enumerate(want.pending.tolist()):
        rows = want.ring(rec, range(kept))
        for name in ("k", "k_scale", "u", "log_decay"):
            assert_same_bits(name, getattr(want, name)[rec, rows], getattr(case.record, name)[rec, rows])


def flush(case: Case) -> None:
    """Commit what is pending, as before a snapshot of the state."""
    nothing = torch.zeros_like(case.args["state_indices"])
    kernel.gdn_commit(
        case.state, case.args["state_indices"], case.record, case.args["record_indices"], None, nothing, tiles=ONE
    )
    case.record.pending.zero_()
    case.record.flush.zero_()


@VARIANTS
def test_fused_commit_rounds_a_bfloat16_state_as_a_separate_one_does(variant: Variant, device: str) -> None:
    def run(deferred: bool) -> tuple[torch.Tensor, torch.Tensor]:
        case = cases.make([chain(4)], seed=3, state_dtype=torch.bfloat16, deferred=deferred).to(device)
        verify(case, variant)
        where = case.args["state_indices"], case.record, case.args["record_indices"]
        path, accepted = as_tensors([[0, 1, 2]], device)
        if deferred:
            kernel.gdn_compact(case.record, where[0], where[2], path, accepted)
            kernel.gdn_advance(case.record, where[0], where[2], accepted, period=1)
        else:
            kernel.gdn_commit(case.state, *where, path, accepted, method=METHOD[variant], tiles=ONE)
        out = verify(case, variant)
        return out, case.state

    for name, want, got in zip(("output", "state"), run(False), run(True), strict=True):
        if variant == "replay":
            assert_same_bits(name, want, got)
        else:
            assert_close(name, want.float(), got.float())


def test_deferred_reference_is_the_same_mathematics() -> None:
    """In float64, with the record of the reference itself."""
    parents = [random_tree(6, 1), comb(5)]
    now = cases.make(parents, seed=2).in_float64()
    later = cases.make(parents, seed=2, deferred=True, period=4).in_float64()
    for step, paths in steps(now, count=4, seed=7):
        path, accepted = as_tensors(paths, "cpu")
        step = step.in_float64()
        where = step.args["state_indices"], step.args["record_indices"]
        outputs = []
        for case in (now, later):
            step.args |= {"state": case.state, "record": case.record}
            outputs.append(verify_reference.gdn_verify(**step.args))
        assert float((outputs[0] - outputs[1]).abs().max()) <= 1e-12
        reference.gdn_commit(now.state, where[0], now.record, where[1], path, accepted)
        reference.gdn_compact(later.record, *where, path, accepted)
        reference.gdn_advance(later.record, *where, accepted, period=4)
    reference.gdn_commit(later.state, where[0], later.record, where[1], None, torch.zeros(2, dtype=torch.int32))
    assert float((now.state - later.state).abs().max()) <= 1e-12


def test_records_are_small() -> None:
    """A record of a 64-node tree holds about 1 % of the states that snapshots would."""
    sizes = {"heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16}
    snapshots = 65 * 32 * 128 * 128 * 4
    at_once = Record.allocate(slots=1, rows=rows_needed(65, path=9), device="meta", **sizes)
    fused = Record.allocate(slots=1, rows=rows_needed(65, path=9, period=1), device="meta", **sizes)
    assert snapshots / at_once.bytes_per_slot > 100
    assert snapshots / fused.bytes_per_slot > 80


def test_records_that_disagree_are_refused() -> None:
    case = cases.make([chain(3)])
    with pytest.raises(ConfigError, match=r"Use Record\.allocate"):
        Record(k=case.record.k, k_scale=case.record.k_scale, u=case.record.u[:, :1], log_decay=case.record.log_decay)
    with pytest.raises(ConfigError, match="at least 1"):
        rows_needed(4, path=2, period=0)
    rows_of(case, case.record.u)
