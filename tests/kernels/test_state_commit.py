"""The commit of all layers against its definition, and against the commits of single layers."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import HAS_GPU
from tests.kernels.close import assert_same_bits
from tests.kernels.mutants import mutant
from thor_spec.errors import ConfigError
from thor_spec.kernels.conv_tree import kernel as conv
from thor_spec.kernels.gdn_commit import kernel as single
from thor_spec.kernels.gdn_common.record import Record
from thor_spec.kernels.state_commit import kernel, reference
from thor_spec.kernels.state_commit.plan import Layer, Layers, Plan, Step

H, HV, D, TAPS, N, ROWS, COLUMNS = 1, 2, 16, 4, 6, 5, 8
BLOCKS = 8 * COLUMNS + 4
DIM = 2 * H * D + HV * D


def make_layer(seed: int, group: int, device: str, state: torch.dtype) -> Layer:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(device)

    record = Record.allocate(
        slots=ROWS, rows=N, heads=H, value_heads=HV, key_dim=D, value_dim=D, dtype=torch.bfloat16, device=device
    )
    record.k.copy_(normal(*record.k.shape))
    record.k_scale.copy_(normal(*record.k_scale.shape).abs())
    record.u.copy_(normal(*record.u.shape))
    record.log_decay.copy_(-normal(*record.log_decay.shape).abs())
    return Layer(
        state=normal(BLOCKS, HV, D, D).to(state),
        # As in vLLM's cache: time before channels, pages apart.
        window=normal(BLOCKS, TAPS, DIM)[:, : TAPS - 1].bfloat16().transpose(1, 2),
        record=record,
        inputs=normal(ROWS, N, DIM).bfloat16(),
        group=group,
    )


def copy_of(layer: Layer) -> Layer:
    window = layer.window.transpose(1, 2).clone().transpose(1, 2)
    return replace(layer, state=layer.state.clone(), window=window)


def a_step(seed: int, device: str, block_size: int) -> tuple[Step, list[torch.Tensor]]:
    """A batch with a row of nobody, rows that verified nothing, and any lengths; and its block tables."""
    rng = random.Random(seed)
    slots = rng.sample(range(8), ROWS)
    queries = [rng.randint(1, N) for _ in range(ROWS)]
    before = [rng.randint(0, 3 * block_size or 30) for _ in range(ROWS)]
    computed = torch.zeros(8, dtype=torch.int32)
    for slot, start, query in zip(slots, before, queries, strict=True):
        computed[slot] = start + rng.randint(0, query)
    table = 1 + torch.arange(8 * COLUMNS, dtype=torch.int32).view(8, COLUMNS)  # no two rows share a block
    tables = [table.to(device), table.flip(0).contiguous().to(device)]
    tables[1][:, :2] = 0  # and some have none
    verified = torch.tensor([rng.random() < 0.8 for _ in range(ROWS)])
    idx = torch.tensor(slots, dtype=torch.int32)
    if seed % 3 == 0:
        idx[2] = -1
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([a + b for a, b in zip(before, queries, strict=True)], dtype=torch.int32)
    given = {"idx_mapping": idx, "verified": verified, "seq_lens": seq_lens, "query_start_loc": starts}
    return Step(**{name: x.to(device) for name, x in {**given, "computed": computed}.items()}), tables


def a_path(seed: int, device: str) -> torch.Tensor:
    """Rising nodes of each row, the root first, in rows that are wider than what is read."""
    rng = random.Random(seed)
    paths = [[0, *sorted(rng.choices(range(1, N), k=N - 1)), 77] for _ in range(ROWS)]
    return torch.tensor(paths, dtype=torch.int32).to(device)


def planned(module: Any, of: tuple[Step, list[torch.Tensor]], device: str, block_size: int) -> Plan:
    plan = Plan.allocate(groups=2, rows=ROWS + 2, device=device)
    for buffer in (plan.accepted, plan.cut, plan.slots, plan.cut_slots):
        buffer.fill_(77)
    step, tables = of
    if module is reference:
        module.plan_commit(plan, step, tables, block_size=block_size)
    else:
        module.plan_commit(plan, step, kernel.table_of(tables), stride=COLUMNS, block_size=block_size)
    return plan


def check(module: Any, seed: int, device: str, *, block_size: int = 4) -> int:
    """Compare a step of two layers with the definition; return how many rows were cut."""
    step = a_step(seed, device, block_size)
    want, got = planned(reference, step, device, block_size), planned(module, step, device, block_size)
    for name in ("accepted", "cut", "slots", "cut_slots"):
        assert_same_bits(name, getattr(want, name), getattr(got, name))
    owned = torch.cat([want.slots[:, :ROWS].flatten(), want.cut_slots[:, :ROWS].flatten()])
    theirs = [make_layer(seed + group, group, device, torch.float32) for group in range(2)]
    free = [block for block in range(BLOCKS) if block not in owned.tolist()]
    for layer in theirs:
        layer.state[free] = math.nan  # what nobody owns is neither read nor written
        layer.window[free] = math.nan
    ours = [copy_of(layer) for layer in theirs]
    path = a_path(seed, device) if seed % 2 else None
    module.commit_states(Layers.of(ours), want, rows=ROWS, path=path)
    module.commit_windows(Layers.of(ours), want, rows=ROWS, path=path)
    reference.commit_states(Layers.of(theirs), want, rows=ROWS, path=path)
    reference.commit_windows(Layers.of(theirs), want, rows=ROWS, path=path)
    for mine, right in zip(ours, theirs, strict=True):
        assert_same_bits("windows", right.window.contiguous(), mine.window.contiguous())
        torch.testing.assert_close(mine.state, right.state, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert mine.state[free].isnan().all()
    return int((want.cut[:ROWS] > 0).sum())


@pytest.mark.parametrize("block_size", [4, 0])
def test_kernels_match_the_definition(block_size: int, device: str) -> None:
    cuts = sum(check(kernel, seed, device, block_size=block_size) for seed in range(6))
    assert (cuts > 3) == (block_size > 0)


def test_states_in_bfloat16(device: str) -> None:
    step = a_step(1, device, 4)
    plan = planned(reference, step, device, 4)
    layer = make_layer(1, 0, device, torch.bfloat16)
    want = copy_of(layer)
    kernel.commit_states(Layers.of([layer]), plan, rows=ROWS)
    reference.commit_states(Layers.of([want]), plan, rows=ROWS)
    torch.testing.assert_close(layer.state, want.state, rtol=8e-3, atol=1e-6)


def test_states_have_the_bits_of_single_commits(device: str) -> None:
    """What lies at the cut has the bits of a commit of that many rows, what is left those of a commit of all."""
    for seed in range(6):
        step = a_step(seed, device, 4)
        plan = planned(reference, step, device, 4)
        layer = make_layer(seed, 0, device, torch.float32)
        want = copy_of(layer)
        rows = torch.arange(ROWS, dtype=torch.int32, device=device)
        slots, cut_slots = plan.slots[0, :ROWS], plan.cut_slots[0, :ROWS]
        for r in range(ROWS):
            if int(cut_slots[r]):
                want.state[cut_slots[r]] = want.state[slots[r]]
                want.window[cut_slots[r]] = want.window[slots[r]]
        for where, counts in ((cut_slots, plan.cut[:ROWS]), (slots, plan.accepted[:ROWS])):
            single.gdn_commit(want.state, where.contiguous(), want.record, rows, None, counts)
            conv.conv_commit(want.window, where.contiguous(), want.inputs, rows, None, counts)
        kernel.commit_states(Layers.of([layer]), plan, rows=ROWS)
        kernel.commit_windows(Layers.of([layer]), plan, rows=ROWS)
        assert_same_bits("states", want.state, layer.state)
        assert_same_bits("windows", want.window.contiguous(), layer.window.contiguous())


def test_layers_of_other_shapes_are_refused() -> None:
    layers = [make_layer(0, 0, "cpu", torch.float32), make_layer(0, 0, "cpu", torch.bfloat16)]
    with pytest.raises(ConfigError, match="one shape"):
        Layers.of(layers)
    with pytest.raises(ConfigError, match="int32"):
        kernel.table_of([torch.zeros(4, 2, dtype=torch.int64)])


@pytest.mark.skipif(HAS_GPU, reason="not run: mutants are interpreted")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("before = seq_len - query", "before = seq_len - query + 1"),
        ("(boundary < after)", "(boundary <= after)"),
        ("(boundary > before)", "(boundary >= before)"),
        ("boundary // BLOCK_SIZE - 1, mask", "boundary // BLOCK_SIZE, mask"),
        ("tl.maximum(seq_len - 1, 0) // BLOCK_SIZE", "after // BLOCK_SIZE"),
        ("count - first, own", "count, own"),
        ("offset = first\n", "offset = first * 0\n"),
        ("own += first", "own += 0"),
        ("node = tl.load(path + at", "node = at + 0 * tl.load(path + at"),
        ("group = tl.load(entry + 7) * PLAN_STRIDE", "group = tl.load(entry + 7) * 0"),
        ("saved = _window_after(first", "saved = _window_after(count"),
        ("saves = (first > 0) & (target > 0)", "saves = target < 0"),
        ("if target > 0:", "if target < 0:"),
        ("if (slot <= 0) | (count <= 0):", "if count <= 0:"),
        ("slab = i_r.to(tl.int64) * rows", "slab = i_r.to(tl.int64) * 0"),
        ("i_r.to(tl.int64) * INPUTS_STRIDE", "i_r.to(tl.int64) * 0"),
    ],
)
def test_a_fault_is_seen(old: str, new: str, tmp_path: Path) -> None:
    broken = mutant(kernel, old, new, tmp_path)
    with pytest.raises(AssertionError):
        sum(check(broken, seed, "cpu") for seed in range(6))
