"""Commit in Triton: see ``reference.py`` for what each function does to states, records and counters."""

from typing import Literal

import torch
import triton
import triton.language as tl

from thor_spec import env
from thor_spec.errors import ConfigError
from thor_spec.kernels.gdn_common.checks import check_record, check_state
from thor_spec.kernels.gdn_common.kernel import fold_rows, fold_rows_by_product, wrap
from thor_spec.kernels.gdn_common.record import Record
from thor_spec.kernels.gdn_verify.tiles import Tiles, commit_tiles, processors


@triton.jit(do_not_specialize=["rows"])
def _commit(state, state_indices, rec_k, rec_scale, rec_u, rec_g, start_row, pending, record_indices, path,
            accepted, rows, STATE_STRIDE: tl.constexpr, PATH_STRIDE: tl.constexpr,
            H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            DEFERRED: tl.constexpr, BY_PATH: tl.constexpr, PER_CHANNEL: tl.constexpr,
            BY_PRODUCT: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    i_v, i_hv, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_h = i_hv // (HV // H)
    slot = tl.load(state_indices + i_r).to(tl.int64)
    if slot <= 0:
        return
    rec = tl.load(record_indices + i_r).to(tl.int64)
    count = tl.load(accepted + i_r).to(tl.int32)
    kept = count * 0
    offset = count * 0
    if DEFERRED:
        offset = tl.load(start_row + rec)
        kept = tl.load(pending + rec)
    if kept + count <= 0:
        return
    slab = rec * rows
    behind = wrap(offset + kept, rows)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    p_h = state + slot * STATE_STRIDE + i_hv * V * K + o_v[:, None] * K + o_k[None, :]
    inside = (o_v < V)[:, None] & (o_k < K)[None, :]
    h = tl.load(p_h, mask=inside, other=0).to(tl.float32)
    # A chain's accepted rows follow the pending ones without a gap.
    if BY_PRODUCT:
        if BY_PATH:
            if DEFERRED:
                h = fold_rows_by_product(h, 0, slab, rows, offset, kept, accepted, rec_k, rec_scale, rec_u, rec_g,
                                         i_h, i_hv, o_k, o_v, H, HV, K, V, False, WIDEN)  # fmt: skip
            h = fold_rows_by_product(h, 0, slab, rows, behind, count, path + i_r * PATH_STRIDE,
                                     rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
                                     H, HV, K, V, True, WIDEN)  # fmt: skip
        else:
            h = fold_rows_by_product(h, 0, slab, rows, offset, kept + count, accepted, rec_k, rec_scale, rec_u, rec_g,
                                     i_h, i_hv, o_k, o_v, H, HV, K, V, False, WIDEN)  # fmt: skip
    elif BY_PATH:
        if DEFERRED:
            h = fold_rows(h, slab, rows, offset, kept, accepted, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
                          H, HV, K, V, PER_CHANNEL, False)  # fmt: skip
        h = fold_rows(h, slab, rows, behind, count, path + i_r * PATH_STRIDE,
                      rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
                      H, HV, K, V, PER_CHANNEL, True)  # fmt: skip
    else:
        h = fold_rows(h, slab, rows, offset, kept + count, accepted, rec_k, rec_scale, rec_u, rec_g,
                      i_h, i_hv, o_k, o_v, H, HV, K, V, PER_CHANNEL, False)  # fmt: skip
    tl.store(p_h, h.to(state.dtype.element_ty), mask=inside)


@triton.jit
def _move_rows(buffer, block, slab, first, count, path, rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = block * BLOCK + tl.arange(0, BLOCK)
    base = buffer + slab * SIZE + at
    # In place: a program moves its columns forward row by row, and a row's new place never lies behind its old one.
    # Each thread loads and stores the same columns, so that its own order is enough.
    for i in range(count):
        node = tl.load(path + i).to(tl.int32)
        if node != i:
            source = wrap(wrap(first + node, rows), rows).to(tl.int64)
            target = wrap(wrap(first + i, rows), rows).to(tl.int64)
            tl.store(base + target * SIZE, tl.load(base + source * SIZE, mask=at < SIZE), mask=at < SIZE)


@triton.jit(do_not_specialize=["rows"])
def _compact(rec_k, rec_scale, rec_u, rec_g, state_indices, start_row, pending, record_indices, path, accepted, rows,
             PATH_STRIDE: tl.constexpr, K_SIZE: tl.constexpr, SCALE_SIZE: tl.constexpr, U_SIZE: tl.constexpr,
             G_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i_r = tl.program_id(1)
    if tl.load(state_indices + i_r) <= 0:
        return
    rec = tl.load(record_indices + i_r).to(tl.int64)
    slab = rec * rows
    first = tl.load(start_row + rec) + tl.load(pending + rec)
    count = tl.load(accepted + i_r).to(tl.int32)
    path += i_r * PATH_STRIDE
    # One launch for the four buffers: programs count through their columns.
    K_BLOCKS: tl.constexpr = (K_SIZE + BLOCK - 1) // BLOCK
    U_BLOCKS: tl.constexpr = (U_SIZE + BLOCK - 1) // BLOCK
    SCALE_BLOCKS: tl.constexpr = (SCALE_SIZE + BLOCK - 1) // BLOCK
    block = tl.program_id(0)
    if block < K_BLOCKS:
        _move_rows(rec_k, block, slab, first, count, path, rows, K_SIZE, BLOCK)
    elif block < K_BLOCKS + U_BLOCKS:
        _move_rows(rec_u, block - K_BLOCKS, slab, first, count, path, rows, U_SIZE, BLOCK)
    elif block < K_BLOCKS + U_BLOCKS + SCALE_BLOCKS:
        _move_rows(rec_scale, block - K_BLOCKS - U_BLOCKS, slab, first, count, path, rows, SCALE_SIZE, BLOCK)
    else:
        _move_rows(rec_g, block - K_BLOCKS - U_BLOCKS - SCALE_BLOCKS, slab, first, count, path, rows, G_SIZE, BLOCK)


@triton.jit
def _advance(
    state_indices, start_row, pending, flush, record_indices, accepted, period, requests, rows, BLOCK: tl.constexpr
):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(state_indices + r, mask=r < requests, other=0) > 0
    rec = tl.load(record_indices + r, mask=own, other=0).to(tl.int64)
    first = tl.load(pending + rec, mask=own, other=0)
    flushed = tl.load(flush + rec, mask=own, other=0) != 0
    start = tl.load(start_row + rec, mask=own, other=0)
    tl.store(start_row + rec, tl.where(flushed, wrap(start + first, rows), start), mask=own)
    now = tl.where(flushed, 0, first) + tl.load(accepted + r, mask=own, other=0).to(tl.int32)
    tl.store(pending + rec, now, mask=own)
    tl.store(flush + rec, (now >= period).to(tl.int32), mask=own)


def gdn_commit(
    state: torch.Tensor,
    state_indices: torch.Tensor,
    record: Record,
    record_indices: torch.Tensor,
    path: torch.Tensor | None,
    accepted: torch.Tensor,
    *,
    method: Literal["replay", "product"] = "replay",
    tiles: Tiles | None = None,
) -> None:
    """Advance each state in place over its accepted rows; see ``reference.gdn_commit``.

    Args:
        method: ``replay`` goes row by row: rows that the replay variant wrote give the bits of one-token decoding.
            ``product`` takes sixteen rows in one product of matrices; not with per-channel decay.
    """
    value_heads, value_dim, key_dim = state.shape[1:]
    check_state(state, value_heads, value_dim, key_dim)
    check_record(record, state, record.k.shape[2], key_dim, record.k.dtype)
    _check_path(path)
    if method == "product" and record.per_channel:
        raise ConfigError('Rows that decay per channel are not one product: use method="replay".')
    requests = state_indices.numel()
    tiles = tiles or commit_tiles(heads=requests * value_heads, value_dim=value_dim, sms=processors(state.device))
    block_v = max(16, tiles.block_v)
    _commit[(triton.cdiv(value_dim, block_v), value_heads, requests)](
        state=state, state_indices=state_indices, rec_k=record.k, rec_scale=record.k_scale, rec_u=record.u,
        rec_g=record.log_decay, start_row=record.start, pending=record.pending,
        record_indices=record_indices, path=path, accepted=accepted,
        STATE_STRIDE=state.stride(0), PATH_STRIDE=0 if path is None else path.stride(0),
        H=record.k.shape[2], HV=value_heads, K=key_dim, V=value_dim, BK=max(16, triton.next_power_of_2(key_dim)),
        BV=block_v, rows=record.rows, DEFERRED=record.pending is not None, BY_PATH=path is not None,
        PER_CHANNEL=record.per_channel, BY_PRODUCT=method == "product", WIDEN=env.triton_interprets(),
        num_warps=tiles.warps, num_stages=1,
    )  # fmt: skip


def gdn_compact(
    record: Record,
    state_indices: torch.Tensor,
    record_indices: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """Close the gaps between the rows of an accepted path; see ``reference.gdn_compact``."""
    if record.pending is None:
        return
    _check_path(path)
    sizes = {
        "K_SIZE": record.k[0, 0].numel(),
        "SCALE_SIZE": record.k_scale[0, 0].numel(),
        "U_SIZE": record.u[0, 0].numel(),
        "G_SIZE": record.log_decay[0, 0].numel(),
    }
    block = min(512, triton.next_power_of_2(max(sizes.values())))
    _compact[(sum(triton.cdiv(size, block) for size in sizes.values()), state_indices.numel())](
        record.k, record.k_scale, record.u, record.log_decay, state_indices, record.start, record.pending,
        record_indices, path, accepted, record.rows, PATH_STRIDE=path.stride(0), **sizes, BLOCK=block, num_warps=4,
    )  # fmt: skip


def gdn_advance(
    record: Record, state_indices: torch.Tensor, record_indices: torch.Tensor, accepted: torch.Tensor, *, period: int
) -> None:
    """Count the accepted rows as pending; see ``reference.gdn_advance``. Once per step, after every layer's compact."""
    if record.pending is None:
        return
    requests = state_indices.numel()
    _advance[(triton.cdiv(requests, 64),)](
        state_indices, record.start, record.pending, record.flush, record_indices, accepted, period, requests,
        record.rows, BLOCK=64, num_warps=1,
    )  # fmt: skip


def _check_path(path: torch.Tensor | None) -> None:
    if path is not None and path.stride(1) != 1:
        raise ConfigError("The entries of a path must be adjacent.")
