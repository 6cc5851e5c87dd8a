"""Tree attention in Triton: the slots of a sequence are shared by several programs, whose parts are merged."""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from thor_spec import env
from thor_spec.errors import ConfigError
from thor_spec.kernels.gdn_verify.tiles import launches_early
from thor_spec.kernels.rounding.kernel import rounded
from thor_spec.kernels.tree_attention.tiles import Tiles
from thor_spec.kernels.tree_paths.reference import MAX_NODES

_LOG2_E = 1.4426950408889634


@triton.jit
def _depth(mask):
    """Depth of a node: bits of its ancestor mask, its own not counted."""
    m1: tl.constexpr = 0x5555555555555555
    m2: tl.constexpr = 0x3333333333333333
    m4: tl.constexpr = 0x0F0F0F0F0F0F0F0F
    # The shift is arithmetic: of a set sign bit, take the copies away.
    n = mask - ((mask >> 1) & m1)
    n = (n & m2) + ((n >> 2) & m2)
    n = (n + (n >> 4)) & m4
    n = n + (n >> 8)
    n = n + (n >> 16)
    n = n + (n >> 32)
    return (n & 127).to(tl.int32) - 1


@triton.jit
def _shares(length, count, splits, window, BN: tl.constexpr, LEAST: tl.constexpr, WINDOWED: tl.constexpr):
    """Return the first slot, slots per program, and how many programs have a share.

    It depends on this sequence and the launch alone, never on the other sequences of a batch.
    """
    begin = 0
    if WINDOWED:
        begin = tl.maximum(0, length - count + 1 - window) // BN * BN  # the root is the node that looks back furthest
    tiles = tl.cdiv(length - begin, BN)
    each = tl.maximum(tl.cdiv(tiles, splits), LEAST)
    return begin, each * BN, tl.cdiv(tiles, each)


@triton.jit
def _blocks(table, start, end, SIZE: tl.constexpr, BN: tl.constexpr):
    """Return the blocks of a tile's first and last slot; a tile that is no longer than a block touches no other."""
    near = start * 0
    far = near
    if BN <= SIZE:
        near = tl.load(table + start // SIZE, mask=start < end, other=0)
        far = near
        if SIZE % BN != 0:
            last = (start + BN - 1) // SIZE
            far = tl.load(table + last, mask=last * SIZE < end, other=0)
    return near, far


@triton.jit
def _attend(acc, total, highest, rows, start, end, near, far, context, mask, position, keys, values, table, masks,
            factor, window,
            K_B: tl.constexpr, K_S: tl.constexpr, V_B: tl.constexpr, V_S: tl.constexpr, SIZE: tl.constexpr,
            D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, NODES: tl.constexpr, WINDOWED: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Take BN slots into the running softmax; ``NODES``: some may hold drafts, which only their descendants see.

    Without nodes and window all slots are there and seen by all rows, and nothing is masked.
    """
    d = tl.arange(0, BD)
    s = start + tl.arange(0, BN)
    if BN <= SIZE:
        within = start % SIZE + tl.arange(0, BN)
        block = near.to(tl.int64)
        offset = within
        if SIZE % BN != 0:  # a select of two blocks costs less than a look-up per slot
            block = tl.where(within >= SIZE, far, near).to(tl.int64)
            offset = tl.where(within >= SIZE, within - SIZE, within)
    else:
        block = tl.load(table + s // SIZE, mask=s < end, other=0).to(tl.int64)
        offset = s % SIZE
    there = (d < D)[None, :] & (s >= 0)[:, None]
    if NODES or WINDOWED:
        live = s < end
        if WINDOWED:
            live = live & (s > context - window)  # blocks behind the window may be anybody's
        there = there & live[:, None]
    p_k = keys + (block * K_B + offset * K_S)[:, None] + d[None, :]
    p_v = values + (block * V_B + offset * V_S)[:, None] + d[None, :]
    if NODES or WINDOWED or D < BD:
        k = tl.load(p_k, mask=there, other=0.0).to(rows.dtype)
        v = tl.load(p_v, mask=there, other=0.0).to(rows.dtype)
    else:
        k = tl.load(p_k).to(rows.dtype)
        v = tl.load(p_v).to(rows.dtype)
    scores = tl.dot(rows, tl.trans(k), input_precision=PRECISION)
    if NODES or WINDOWED:
        seen = live[None, :]
        drafted = s - context
        if NODES:
            descends = (mask[:, None] >> tl.minimum(tl.maximum(drafted, 0), 63).to(tl.int64)[None, :]) & 1
            seen = seen & ((drafted < 0)[None, :] | (descends != 0))
        if WINDOWED:
            at = s
            if NODES:
                of_key = tl.load(masks + drafted, mask=live & (drafted >= 0), other=0)
                at = tl.where(drafted < 0, s, context + _depth(of_key))
            seen = seen & (at[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    now = tl.maximum(highest, tl.max(scores, axis=1) * factor)
    base = now
    if NODES or WINDOWED:
        base = tl.where(now == float("-inf"), 0.0, now)  # nothing seen yet: no -inf minus -inf
    weights = tl.exp2(scores * factor - base[:, None])
    keep = tl.exp2(highest - base)
    total = total * keep + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc=acc * keep[:, None], input_precision=PRECISION)
    return acc, total, now


@triton.jit(do_not_specialize=["splits", "window", "width"])
def _part(q, keys, values, block_table, seq_lens, masks, cu_nodes, key_scale, value_scale, out, part, part_max,
          part_sum, scale_log2, window, splits, width,
          Q_T: tl.constexpr, Q_H: tl.constexpr, OUT_T: tl.constexpr, OUT_H: tl.constexpr, K_B: tl.constexpr,
          K_S: tl.constexpr, K_H: tl.constexpr, V_B: tl.constexpr, V_S: tl.constexpr, V_H: tl.constexpr,
          TABLE: tl.constexpr, MASKS: tl.constexpr, SIZE: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr,
          D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LEAST: tl.constexpr,
          SPLIT: tl.constexpr, WINDOWED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
          INTERPRETED: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    i_r, head = tl.program_id(1) // HKV, tl.program_id(1) % HKV
    split = tl.program_id(2)
    group: tl.constexpr = HQ // HKV
    first = tl.load(cu_nodes + i_r).to(tl.int64)
    count = (tl.load(cu_nodes + i_r + 1) - first).to(tl.int32)
    length = tl.load(seq_lens + i_r).to(tl.int32)
    begin, share, used = _shares(length, count, splits, window, BN, LEAST, WINDOWED)
    if (length <= 0) | (tl.program_id(0) * BM >= count * group) | (split >= used):
        return
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    node = row // group
    own = node < count
    head_q = head * group + row % group
    d = tl.arange(0, BD)
    context = length - count
    masks += i_r * MASKS
    mask = tl.load(masks + node, mask=own, other=0)
    p_q = q + (first + node)[:, None] * Q_T + head_q[:, None] * Q_H + d[None, :]
    rows = tl.load(p_q, mask=own[:, None] & (d < D)[None, :], other=0.0)
    if INTERPRETED:  # it cannot multiply bfloat16; widening is exact
        rows = rows.to(tl.float32)
    factor = scale_log2
    if SCALED:
        factor *= tl.load(key_scale)

    position = context + _depth(mask)
    begin += split * share
    end = tl.minimum(begin + share, length)
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    keys += head * K_H
    values += head * V_H
    table = block_table + i_r * TABLE
    drafts = tl.minimum(end, tl.maximum(begin, context // BN * BN))  # from here on, slots may be those of nodes
    # Blocks are looked up one tile ahead: a load whose address waits for another load is not started in advance.
    near, far = _blocks(table, begin, end, SIZE, BN)
    for start in range(begin, drafts, BN):
        near_next, far_next = _blocks(table, start + BN, end, SIZE, BN)
        acc, total, highest = _attend(
            acc, total, highest, rows, start, end, near, far, context, mask, position, keys, values, table, masks,
            factor, window, K_B, K_S, V_B, V_S, SIZE, D, BD, BN, False, WINDOWED, PRECISION
        )  # fmt: skip
        near, far = near_next, far_next
    for start in range(drafts, end, BN):
        near_next, far_next = _blocks(table, start + BN, end, SIZE, BN)
        acc, total, highest = _attend(
            acc, total, highest, rows, start, end, near, far, context, mask, position, keys, values, table, masks,
            factor, window, K_B, K_S, V_B, V_S, SIZE, D, BD, BN, True, WINDOWED, PRECISION
        )  # fmt: skip
        near, far = near_next, far_next

    if SCALED:
        acc *= tl.load(value_scale)
    inside = own[:, None] & (d < D)[None, :]
    if SPLIT:  # noqa: SIM102 -- decided by the compiler
        if used > 1:
            at_part = ((i_r.to(tl.int64) * width + node) * HQ + head_q) * splits + split
            tl.store(part_max + at_part, highest, mask=own)
            tl.store(part_sum + at_part, total, mask=own)
            tl.store(part + at_part[:, None] * D + d[None, :], acc, mask=inside)
            return
    p_out = out + (first + node)[:, None] * OUT_T + head_q[:, None] * OUT_H + d[None, :]
    mean = acc / tl.where(own, total, 1.0)[:, None]
    tl.store(p_out, rounded(mean, out.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit(do_not_specialize=["splits", "window", "width"])
def _merge(part, part_max, part_sum, seq_lens, cu_nodes, out, window, splits, width, OUT_T: tl.constexpr,
           OUT_H: tl.constexpr, HQ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
           LEAST: tl.constexpr, BS: tl.constexpr, WINDOWED: tl.constexpr, INTERPRETED: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()  # before any return: who waits for this kernel relies on the one before it, too
    t, head, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_nodes + i_r).to(tl.int64)
    count = (tl.load(cu_nodes + i_r + 1) - first).to(tl.int32)
    length = tl.load(seq_lens + i_r).to(tl.int32)
    _begin, _share, used = _shares(length, count, splits, window, BN, LEAST, WINDOWED)
    if (length <= 0) | (t >= count) | (used == 1):
        return
    d = tl.arange(0, BD)
    at_part = ((i_r.to(tl.int64) * width + t) * HQ + head) * splits
    highest = tl.full([BS], float("-inf"), tl.float32)
    total = tl.zeros([BS], tl.float32)
    merged = tl.zeros([BS, BD], tl.float32)
    for start in range(0, used, BS):
        i = start + tl.arange(0, BS)
        lead = tl.load(part_max + at_part + i, mask=i < used, other=float("-inf"))
        sums = tl.load(part_sum + at_part + i, mask=i < used, other=0.0)
        inside = (i < used)[:, None] & (d < D)[None, :]
        parts = tl.load(part + (at_part + i)[:, None] * D + d[None, :], mask=inside, other=0.0)
        now = tl.maximum(highest, lead)
        base = tl.where(now == float("-inf"), 0.0, now)  # a part may hold nothing that this node sees
        keep, weight = tl.exp2(highest - base), tl.exp2(lead - base)
        merged = merged * keep[:, None] + parts * weight[:, None]
        total = total * keep + sums * weight
        highest = now
    weight = tl.exp2(highest - tl.max(highest, axis=0))
    mean = tl.sum(merged * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    p_out = out + (first + t) * OUT_T + head * OUT_H + d
    tl.store(p_out, rounded(mean, out.dtype.element_ty, INTERPRETED), mask=d < D)


@dataclass(frozen=True, slots=True)
class Parts:
    """Where programs that share a sequence leave their parts. One set serves all layers.

    N: requests times the nodes that each may have, whatever other tokens a step brings.
    """

    acc: torch.Tensor
    """[N, HQ, splits, D], float32."""
    highest: torch.Tensor
    """[N, HQ, splits], float32, in powers of two."""
    total: torch.Tensor
    """[N, HQ, splits], float32."""

    @classmethod
    def allocate(cls, nodes: int, heads: int, dim: int, splits: int, device: torch.device | str) -> Self:
        """Return buffers for launches of up to ``nodes``, a request's most times the requests."""
        acc = torch.empty(nodes, heads, splits, dim, dtype=torch.float32, device=device)
        highest, total = torch.empty_like(acc[..., 0]).contiguous(), torch.empty_like(acc[..., 0]).contiguous()
        return cls(acc, highest, total)


def tree_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    masks: torch.Tensor,
    cu_nodes: torch.Tensor,
    *,
    scale: float,
    tiles: Tiles,
    width: int,
    window: int | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    parts: Parts | None = None,
) -> torch.Tensor:
    """Attend along paths; see ``reference.tree_attention``.

    Args:
        tiles: from ``Tiles.choose``; part of what a graph captures.
        width: most nodes of one request in this launch.
        key_scale: what keys of an 8-bit cache are multiplied with, one element on the device; likewise
            ``value_scale``. Both or none.
        parts: kept from launch to launch; None allocates.

    Raises: ConfigError, if a shape or layout does not fit.
    """
    _, heads, dim = q.shape
    kv_heads, requests = keys.shape[2], seq_lens.numel()
    out = torch.empty_like(q) if out is None else out
    if scale <= 0:
        raise ConfigError(f"tree_attention: scale={scale} must be positive: scores are scaled behind their maximum.")
    if heads % kv_heads or width > min(MAX_NODES, masks.shape[1]) or (key_scale is None) != (value_scale is None):
        raise ConfigError(
            f"tree_attention: {heads} query heads over {kv_heads}, {width} nodes, masks {tuple(masks.shape)}: heads "
            f"must divide, at most {MAX_NODES} nodes fit a mask, and scales come in pairs."
        )
    if any(t.stride(-1) != 1 for t in (q, keys, values, out, masks, block_table)):
        raise ConfigError("tree_attention: the last axis of each tensor must be adjacent.")
    if tiles.splits > 1 and parts is None:
        parts = Parts.allocate(requests * width, heads, dim, tiles.splits, q.device)
    if parts is not None and (
        parts.acc.shape[1:] != (heads, tiles.splits, dim) or parts.acc.shape[0] < requests * width
    ):
        raise ConfigError(
            f"tree_attention: parts of {tuple(parts.acc.shape)} do not fit {requests} times {width} nodes, {heads} "
            f"heads, {tiles.splits} splits, dim {dim}."
        )
    group, block_d = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    acc, highest, total = (parts.acc, parts.highest, parts.total) if parts else (None, None, None)
    split, early = tiles.splits > 1, launches_early(q.device)
    shared = {
        "seq_lens": seq_lens, "cu_nodes": cu_nodes, "out": out, "part": acc, "part_max": highest, "part_sum": total,
        "window": window or 0, "splits": tiles.splits, "width": width, "OUT_T": out.stride(0), "OUT_H": out.stride(1),
        "HQ": heads,
        "D": dim, "BD": block_d, "BN": tiles.slots, "LEAST": tiles.least, "WINDOWED": window is not None,
        "INTERPRETED": env.triton_interprets(), "EARLY": split and early,
    }  # fmt: skip
    _part[(triton.cdiv(width * group, tiles.rows), requests * kv_heads, tiles.splits)](
        q=q, keys=keys, values=values, block_table=block_table, masks=masks, key_scale=key_scale,
        value_scale=value_scale, scale_log2=scale * _LOG2_E, Q_T=q.stride(0), Q_H=q.stride(1), K_B=keys.stride(0),
        K_S=keys.stride(1), K_H=keys.stride(2), V_B=values.stride(0), V_S=values.stride(1), V_H=values.stride(2),
        TABLE=block_table.stride(0), MASKS=masks.stride(0), SIZE=keys.shape[1], HKV=kv_heads, BM=tiles.rows,
        SPLIT=split, SCALED=key_scale is not None, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages, **shared,
    )  # fmt: skip
    if split:
        _merge[(width, heads, requests)](
            **shared, BS=min(8, triton.next_power_of_2(tiles.splits)), num_warps=4,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out
