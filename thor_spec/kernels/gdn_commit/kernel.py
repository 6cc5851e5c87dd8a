"""Commit in Triton: see ``reference.py`` for what each function does to states, records and counters."""

from typing import Literal

import torch
import triton
import triton.language as tl

from thor_spec import env
from thor_spec.errors import ConfigError
from thor_spec.kernels.gdn_common.checks import check_record, check_state
from thor_spec.kernels.gdn_common.kernel import fold_rows, fold_rows_by_product
from thor_spec.kernels.gdn_common.record import Record
from thor_spec.kernels.gdn_verify.tiles import Tiles, commit_tiles, processors


@triton.jit
def _commit(state, state_indices, rec_k, rec_scale, rec_u, rec_g, pending, record_indices, path, accepted,
            STATE_STRIDE: tl.constexpr, PATH_STRIDE: tl.constexpr,
            H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            ROWS: tl.constexpr, DEFERRED: tl.constexpr, BY_PATH: tl.constexpr, PER_CHANNEL: tl.constexpr,
            BY_PRODUCT: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    i_v, i_hv, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_h = i_hv // (HV // H)
    slot = tl.load(state_indices + i_r).to(tl.int64)
    if slot <= 0:
        return
    rec = tl.load(record_indices + i_r).to(tl.int64)
    count = tl.load(accepted + i_r).to(tl.int32)
    kept = count * 0
    if DEFERRED:
        kept = tl.load(pending + rec)
    if kept + count <= 0:
        return
    first = rec * ROWS
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    p_h = state + slot * STATE_STRIDE + i_hv * V * K + o_v[:, None] * K + o_k[None, :]
    inside = (o_v < V)[:, None] & (o_k < K)[None, :]
    h = tl.load(p_h, mask=inside, other=0).to(tl.float32)
    if BY_PRODUCT:
        if DEFERRED:
            h = fold_rows_by_product(h, first, kept, accepted, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
                                     H, HV, K, V, False, WIDEN)  # fmt: skip
        h = fold_rows_by_product(h, first + kept, count, path + i_r * PATH_STRIDE if BY_PATH else accepted,
                                 rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
                                 H, HV, K, V, BY_PATH, WIDEN)  # fmt: skip
    else:
        if DEFERRED:
            h = fold_rows(h, first, kept, accepted, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
                          H, HV, K, V, PER_CHANNEL, False)  # fmt: skip
        h = fold_rows(h, first + kept, count, path + i_r * PATH_STRIDE if BY_PATH else accepted,
                      rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
                      H, HV, K, V, PER_CHANNEL, BY_PATH)  # fmt: skip
    tl.store(p_h, h.to(state.dtype.element_ty), mask=inside)


@triton.jit
def _compact(buffer, state_indices, pending, flush, record_indices, path, accepted,
             PATH_STRIDE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i_r = tl.program_id(1)
    if tl.load(state_indices + i_r) <= 0:
        return
    rec = tl.load(record_indices + i_r).to(tl.int64)
    first = tl.load(pending + rec)
    kept = tl.where(tl.load(flush + rec) != 0, 0, first)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    base = buffer + rec * ROWS * SIZE + at
    # In place: a program moves its columns upwards row by row, and a row's new place is never below its old one. Each
    # thread loads and stores the same columns, so that its own order is enough.
    for i in range(tl.load(accepted + i_r).to(tl.int32)):
        source = first + tl.load(path + i_r * PATH_STRIDE + i).to(tl.int32)
        value = tl.load(base + source.to(tl.int64) * SIZE, mask=at < SIZE)
        tl.store(base + (kept + i).to(tl.int64) * SIZE, value, mask=at < SIZE)


@triton.jit
def _advance(state_indices, pending, flush, record_indices, accepted, period, requests, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(state_indices + r, mask=r < requests, other=0) > 0
    rec = tl.load(record_indices + r, mask=own, other=0).to(tl.int64)
    first = tl.load(pending + rec, mask=own, other=0)
    kept = tl.where(tl.load(flush + rec, mask=own, other=0) != 0, 0, first)
    now = kept + tl.load(accepted + r, mask=own, other=0).to(tl.int32)
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
        rec_g=record.log_decay, pending=record.pending, record_indices=record_indices, path=path, accepted=accepted,
        STATE_STRIDE=state.stride(0), PATH_STRIDE=0 if path is None else path.stride(0),
        H=record.k.shape[2], HV=value_heads, K=key_dim, V=value_dim, BK=max(16, triton.next_power_of_2(key_dim)),
        BV=block_v, ROWS=record.rows, DEFERRED=record.pending is not None, BY_PATH=path is not None,
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
    """Move the rows of an accepted path behind those that stay pending; see ``reference.gdn_compact``."""
    if record.pending is None:
        return
    _check_path(path)
    for buffer in (record.k, record.k_scale, record.u, record.log_decay):
        size = buffer[0, 0].numel()
        block = min(512, max(16, triton.next_power_of_2(size)))
        _compact[(triton.cdiv(size, block), state_indices.numel())](
            buffer, state_indices, record.pending, record.flush, record_indices, path, accepted,
            PATH_STRIDE=path.stride(0), ROWS=record.rows, SIZE=size, BLOCK=block, num_warps=4,
        )  # fmt: skip


def gdn_advance(
    record: Record, state_indices: torch.Tensor, record_indices: torch.Tensor, accepted: torch.Tensor, *, period: int
) -> None:
    """Count the accepted rows as pending; see ``reference.gdn_advance``. Once per step, after every layer's compact."""
    if record.pending is None:
        return
    requests = state_indices.numel()
    _advance[(triton.cdiv(requests, 64),)](
        state_indices, record.pending, record.flush, record_indices, accepted, period, requests, BLOCK=64, num_warps=1
    )


def _check_path(path: torch.Tensor | None) -> None:
    if path is not None and path.stride(1) != 1:
        raise ConfigError("The entries of a path must be adjacent.")
