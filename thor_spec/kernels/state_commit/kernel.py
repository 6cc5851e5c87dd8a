"""Three launches a step, whatever the number of layers: the plan, the states, the windows. See ``reference.py``."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from thor_spec.errors import ConfigError
from thor_spec.kernels.gdn_common.kernel import fold_rows
from thor_spec.kernels.gdn_verify.tiles import Tiles, commit_tiles, processors
from thor_spec.kernels.state_commit.plan import ADDRESSES, Layers, Plan, Step

BLOCK = 256
_COLUMNS = len(ADDRESSES)


@triton.jit(do_not_specialize=["rows"])
def _plan(accepted, cut, slots, cut_slots, idx_mapping, verified, seq_lens, query_start_loc, computed, tables, rows,
          PLAN_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
          BR: tl.constexpr):  # fmt: skip
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    inside = r < rows
    slot = tl.load(idx_mapping + r, mask=inside, other=-1).to(tl.int64)
    own = inside & (slot >= 0) & (tl.load(verified + r, mask=inside, other=0) != 0)
    seq_len = tl.load(seq_lens + r, mask=own, other=0)
    query = tl.load(query_start_loc + r + 1, mask=own, other=0) - tl.load(query_start_loc + r, mask=own, other=0)
    before = seq_len - query
    after = tl.load(computed + slot, mask=own, other=0).to(tl.int32)
    gained = tl.where(own, tl.maximum(after - before, 0), 0)
    column = seq_len * 0
    boundary = seq_len * 0
    if BLOCK_SIZE > 0:
        column = tl.maximum(seq_len - 1, 0) // BLOCK_SIZE
        boundary = after // BLOCK_SIZE * BLOCK_SIZE
    cuts = own & (boundary > before) & (boundary < after)
    tl.store(accepted + r, gained, mask=inside)
    tl.store(cut + r, tl.where(cuts, boundary - before, 0), mask=inside)
    for g in tl.static_range(GROUPS):
        table = tl.load(tables + g).to(tl.pointer_type(tl.int32)) + slot * TABLE_STRIDE
        at = tl.load(table + column, mask=own & (gained > 0), other=0)
        tl.store(slots + g * PLAN_STRIDE + r, at, mask=inside)
        if BLOCK_SIZE > 0:
            saved = tl.load(table + boundary // BLOCK_SIZE - 1, mask=cuts, other=0)
            tl.store(cut_slots + g * PLAN_STRIDE + r, saved, mask=inside)
        else:
            tl.store(cut_slots + g * PLAN_STRIDE + r, at * 0, mask=inside)


@triton.jit
def _pointer(address, like, ALIGN: tl.constexpr):
    """Return the pointer at ``address``, with what is known of its alignment: else nothing is loaded in vectors."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(like.dtype.element_ty)), ALIGN)


@triton.jit(do_not_specialize=["rows"])
def _states(table, accepted, cut, slots, cut_slots, path, state_like, k_like, u_like, rows,
            PLAN_STRIDE: tl.constexpr, PATH_STRIDE: tl.constexpr, BY_PATH: tl.constexpr,
            STATE_STRIDE: tl.constexpr, COLUMNS: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
            V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    SPLIT: tl.constexpr = (V + BV - 1) // BV
    i_r = tl.program_id(1)
    entry = table + tl.program_id(2) * COLUMNS
    group = tl.load(entry + 7) * PLAN_STRIDE
    slot = tl.load(slots + group + i_r).to(tl.int64)
    count = tl.load(accepted + i_r)
    if (slot <= 0) | (count <= 0):
        return
    i_hv = tl.program_id(0) // SPLIT
    i_h = i_hv // (HV // H)
    state = _pointer(entry, state_like, ALIGN)
    rec_k = _pointer(entry + 1, k_like, ALIGN)
    rec_scale = _pointer(entry + 2, u_like, ALIGN)
    rec_u = _pointer(entry + 3, u_like, ALIGN)
    rec_g = _pointer(entry + 4, u_like, ALIGN)
    o_k = tl.arange(0, BK)
    o_v = tl.program_id(0) % SPLIT * BV + tl.arange(0, BV)
    inside = (o_v < V)[:, None] & (o_k < K)[None, :]
    tile = i_hv * V * K + o_v[:, None] * K + o_k[None, :]
    slab = i_r.to(tl.int64) * rows
    h = tl.load(state + slot * STATE_STRIDE + tile, mask=inside, other=0).to(tl.float32)
    first = tl.load(cut + i_r)
    own = path + i_r * PATH_STRIDE
    if first > 0:
        h = fold_rows(h, slab, rows, first * 0, first, own, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
                      H, HV, K, V, False, BY_PATH)  # fmt: skip
        target = tl.load(cut_slots + group + i_r).to(tl.int64)
        if target > 0:
            tl.store(state + target * STATE_STRIDE + tile, h.to(state_like.dtype.element_ty), mask=inside)
    offset = first
    if BY_PATH:
        own += first
        offset = first * 0
    h = fold_rows(h, slab, rows, offset, count - first, own, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
                  H, HV, K, V, False, BY_PATH)  # fmt: skip
    tl.store(state + slot * STATE_STRIDE + tile, h.to(state_like.dtype.element_ty), mask=inside)


@triton.jit
def _window_after(count, p_window, p_inputs, path, j, inside, WINDOW_T: tl.constexpr, D: tl.constexpr,
                  KEPT: tl.constexpr, BY_PATH: tl.constexpr):  # fmt: skip
    at = count + j - KEPT  # place among this step's inputs; negative: this many before them, in the window
    node = at
    if BY_PATH:
        node = tl.load(path + at, mask=(j < KEPT) & (at >= 0), other=0).to(at.dtype)
    old = tl.load(p_window + (KEPT + at)[:, None] * WINDOW_T, mask=inside & (at < 0)[:, None], other=0)
    new = tl.load(p_inputs + node[:, None].to(tl.int64) * D, mask=inside & (at >= 0)[:, None], other=0)
    return tl.where((at < 0)[:, None], old, new.to(old.dtype))


@triton.jit
def _windows(table, accepted, cut, slots, cut_slots, path, window_like, inputs_like, PLAN_STRIDE: tl.constexpr,
             PATH_STRIDE: tl.constexpr, BY_PATH: tl.constexpr, WINDOW_STRIDE: tl.constexpr,
             WINDOW_D: tl.constexpr, WINDOW_T: tl.constexpr, INPUTS_STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
             D: tl.constexpr, KEPT: tl.constexpr, BJ: tl.constexpr, BD: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    i_r = tl.program_id(1)
    entry = table + tl.program_id(2) * COLUMNS
    group = tl.load(entry + 7) * PLAN_STRIDE
    slot = tl.load(slots + group + i_r).to(tl.int64)
    count = tl.load(accepted + i_r)
    if (slot <= 0) | (count <= 0):
        return
    window = _pointer(entry + 5, window_like, ALIGN)
    inputs = _pointer(entry + 6, inputs_like, ALIGN)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    j = tl.arange(0, BJ)
    inside = (d < D)[None, :] & (j < KEPT)[:, None]
    p_window = window + slot * WINDOW_STRIDE + d[None, :] * WINDOW_D
    p_inputs = inputs + i_r.to(tl.int64) * INPUTS_STRIDE + d[None, :]
    first = tl.load(cut + i_r)
    target = tl.load(cut_slots + group + i_r).to(tl.int64)
    saves = (first > 0) & (target > 0)
    own = path + i_r * PATH_STRIDE
    last = _window_after(count, p_window, p_inputs, own, j, inside, WINDOW_T, D, KEPT, BY_PATH)
    saved = _window_after(first, p_window, p_inputs, own, j, inside & saves, WINDOW_T, D, KEPT, BY_PATH)
    # All is read before anything is written: the rows of one channel may sit in different threads.
    tl.debug_barrier()
    p_saved = window + target * WINDOW_STRIDE + d[None, :] * WINDOW_D
    tl.store(p_saved + j[:, None] * WINDOW_T, saved, mask=inside & saves)
    tl.store(p_window + j[:, None] * WINDOW_T, last, mask=inside)


def table_of(tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the addresses of block tables [G], int64, for ``plan_commit``. Raises: ConfigError, if they differ."""
    if len({(table.dtype, table.stride(0)) for table in tables}) != 1 or tables[0].dtype != torch.int32:
        raise ConfigError("Block tables of all groups must be int32 and as wide as one another.")
    return torch.tensor([table.data_ptr() for table in tables], dtype=torch.int64).to(tables[0].device)


def plan_commit(plan: Plan, step: Step, tables: torch.Tensor, *, stride: int, block_size: int) -> None:
    """Write the plan; see ``reference.plan_commit``.

    Args:
        tables: from ``table_of``; the tables must stay where they are.
        stride: entries from one request slot to the next in each of them.
    """
    _plan[(triton.cdiv(step.rows, 64),)](
        plan.accepted, plan.cut, plan.slots, plan.cut_slots, step.idx_mapping, step.verified, step.seq_lens,
        step.query_start_loc, step.computed, tables, step.rows, PLAN_STRIDE=plan.slots.stride(0), TABLE_STRIDE=stride,
        GROUPS=tables.numel(), BLOCK_SIZE=block_size, BR=64, num_warps=1,
    )  # fmt: skip


def commit_states(
    layers: Layers, plan: Plan, *, rows: int, path: torch.Tensor | None = None, tiles: Tiles | None = None
) -> None:
    """Advance all states; see ``reference.commit_states``. Row by row: the bits of one-token decoding."""
    first = layers.layers[0]
    value_heads, value_dim, key_dim = first.state.shape[1:]
    count = len(layers.layers)
    heads = rows * count * value_heads
    tiles = tiles or commit_tiles(heads=heads, value_dim=value_dim, sms=processors(first.state.device))
    block_v = max(16, tiles.block_v)
    _states[(triton.cdiv(value_dim, block_v) * value_heads, rows, count)](
        layers.table, plan.accepted, plan.cut, plan.slots, plan.cut_slots, plan.accepted if path is None else path,
        first.state, first.record.k, first.record.u, first.record.rows, PLAN_STRIDE=plan.slots.stride(0),
        PATH_STRIDE=0 if path is None else path.stride(0), BY_PATH=path is not None, STATE_STRIDE=first.state.stride(0),
        COLUMNS=_COLUMNS, H=first.record.k.shape[2], HV=value_heads, K=key_dim, V=value_dim,
        BK=max(16, triton.next_power_of_2(key_dim)), BV=block_v, ALIGN=layers.alignment, num_warps=tiles.warps,
        num_stages=1,
    )  # fmt: skip


def commit_windows(layers: Layers, plan: Plan, *, rows: int, path: torch.Tensor | None = None) -> None:
    """Shift all windows; see ``reference.commit_windows``."""
    first = layers.layers[0]
    dim, kept = first.window.shape[1:]
    _windows[(triton.cdiv(dim, BLOCK), rows, len(layers.layers))](
        layers.table, plan.accepted, plan.cut, plan.slots, plan.cut_slots, plan.accepted if path is None else path,
        first.window, first.inputs, PLAN_STRIDE=plan.slots.stride(0),
        PATH_STRIDE=0 if path is None else path.stride(0), BY_PATH=path is not None,
        WINDOW_STRIDE=first.window.stride(0), WINDOW_D=first.window.stride(1), WINDOW_T=first.window.stride(2),
        INPUTS_STRIDE=first.inputs.stride(0), COLUMNS=_COLUMNS, D=dim, KEPT=kept,
        BJ=triton.next_power_of_2(kept), BD=BLOCK, ALIGN=layers.alignment, num_warps=4,
    )  # fmt: skip
