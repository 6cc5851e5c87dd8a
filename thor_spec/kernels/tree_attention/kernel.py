"""Tree attention in Triton: the slots of a sequence are shared by several programs, whose parts are merged."""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from thor_spec import env
from thor_spec.errors import ConfigError
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
def _attend(acc, total, highest, rows, start, end, context, mask, own, position, keys, values, table, masks,
            key_scale, scale_log2, window,
            K_B: tl.constexpr, K_S: tl.constexpr, V_B: tl.constexpr, V_S: tl.constexpr, SIZE: tl.constexpr,
            D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, NODES: tl.constexpr, WINDOWED: tl.constexpr,
            SCALED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Take BN slots into the running softmax; ``NODES``: some may hold drafts, which only their descendants see."""
    d = tl.arange(0, BD)
    s = start + tl.arange(0, BN)
    live = s < end
    block = tl.load(table + s // SIZE, mask=live, other=0).to(tl.int64)
    offset = (s % SIZE).to(tl.int64)
    p_k = keys + block * K_B + offset * K_S
    k = tl.load(p_k[None, :] + d[:, None], mask=live[None, :] & (d < D)[:, None], other=0.0).to(rows.dtype)
    scores = tl.dot(rows, k, input_precision=PRECISION) * scale_log2
    if SCALED:
        scores *= tl.load(key_scale)
    seen = live[None, :] & own[:, None]
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
    now = tl.maximum(highest, tl.max(scores, axis=1))
    base = tl.where(now == float("-inf"), 0.0, now)  # nothing seen yet: no -inf minus -inf
    weights = tl.exp2(scores - base[:, None])
    keep = tl.exp2(highest - base)
    total = total * keep + tl.sum(weights, axis=1)
    p_v = values + block * V_B + offset * V_S
    v = tl.load(p_v[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0).to(rows.dtype)
    acc = acc * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return acc, total, now


@triton.jit
def _part(q, keys, values, block_table, seq_lens, masks, cu_nodes, key_scale, value_scale, out, part, part_max,
          part_sum, scale_log2, window,
          Q_T: tl.constexpr, Q_H: tl.constexpr, OUT_T: tl.constexpr, OUT_H: tl.constexpr, K_B: tl.constexpr,
          K_S: tl.constexpr, K_H: tl.constexpr, V_B: tl.constexpr, V_S: tl.constexpr, V_H: tl.constexpr,
          TABLE: tl.constexpr, MASKS: tl.constexpr, SIZE: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr,
          D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
          WINDOWED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
          INTERPRETED: tl.constexpr):  # fmt: skip
    i_r, head = tl.program_id(1) // HKV, tl.program_id(1) % HKV
    split = tl.program_id(2)
    group: tl.constexpr = HQ // HKV
    first = tl.load(cu_nodes + i_r).to(tl.int64)
    count = (tl.load(cu_nodes + i_r + 1) - first).to(tl.int32)
    length = tl.load(seq_lens + i_r).to(tl.int32)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    if (length <= 0) | (tl.program_id(0) * BM >= count * group):
        return
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

    begin = 0
    position = context + _depth(mask)
    if WINDOWED:
        begin = tl.maximum(0, context + 1 - window) // BN * BN  # the root is the node that looks back furthest
    share = tl.cdiv(tl.cdiv(length - begin, BN), SPLITS) * BN
    begin += split * share
    end = tl.minimum(begin + share, length)
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    keys += head * K_H
    values += head * V_H
    table = block_table + i_r * TABLE
    drafts = tl.minimum(end, tl.maximum(begin, context // BN * BN))  # from here on, slots may be those of nodes
    for start in range(begin, drafts, BN):
        acc, total, highest = _attend(
            acc, total, highest, rows, start, end, context, mask, own, position, keys, values, table, masks,
            key_scale, scale_log2, window, K_B, K_S, V_B, V_S, SIZE, D, BD, BN, False, WINDOWED, SCALED, PRECISION
        )  # fmt: skip
    for start in range(drafts, end, BN):
        acc, total, highest = _attend(
            acc, total, highest, rows, start, end, context, mask, own, position, keys, values, table, masks,
            key_scale, scale_log2, window, K_B, K_S, V_B, V_S, SIZE, D, BD, BN, True, WINDOWED, SCALED, PRECISION
        )  # fmt: skip

    if SCALED:
        acc *= tl.load(value_scale)
    inside = own[:, None] & (d < D)[None, :]
    if SPLITS == 1:
        p_out = out + (first + node)[:, None] * OUT_T + head_q[:, None] * OUT_H + d[None, :]
        mean = acc / tl.where(own, total, 1.0)[:, None]
        tl.store(p_out, rounded(mean, out.dtype.element_ty, INTERPRETED), mask=inside)
    else:
        at_part = ((first + node) * HQ + head_q) * SPLITS + split
        tl.store(part_max + at_part, highest, mask=own)
        tl.store(part_sum + at_part, total, mask=own)
        if begin < end:
            tl.store(part + at_part[:, None] * D + d[None, :], acc, mask=inside)


@triton.jit
def _merge(part, part_max, part_sum, seq_lens, cu_nodes, out, OUT_T: tl.constexpr, OUT_H: tl.constexpr,
           HQ: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr,
           INTERPRETED: tl.constexpr):  # fmt: skip
    t, head, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(cu_nodes + i_r).to(tl.int64)
    if (tl.load(seq_lens + i_r) <= 0) | (t >= tl.load(cu_nodes + i_r + 1) - first):
        return
    i = tl.arange(0, SPLITS)
    d = tl.arange(0, BD)
    at_part = ((first + t) * HQ + head) * SPLITS + i
    highest = tl.load(part_max + at_part)
    weight = tl.exp2(highest - tl.max(highest, axis=0))
    total = tl.sum(weight * tl.load(part_sum + at_part), axis=0)
    has_some = weight > 0  # the others' buffers may never have been written
    parts = tl.load(part + at_part[:, None] * D + d[None, :], mask=has_some[:, None] & (d < D)[None, :], other=0)
    merged = tl.sum(parts * weight[:, None], axis=0) / total
    p_out = out + (first + t) * OUT_T + head * OUT_H + d
    tl.store(p_out, rounded(merged, out.dtype.element_ty, INTERPRETED), mask=d < D)


@dataclass(frozen=True, slots=True)
class Parts:
    """Where programs that share a sequence leave their parts. One set serves all layers."""

    acc: torch.Tensor
    """[T, HQ, splits, D], float32."""
    highest: torch.Tensor
    """[T, HQ, splits], float32, in powers of two."""
    total: torch.Tensor
    """[T, HQ, splits], float32."""

    @classmethod
    def allocate(cls, tokens: int, heads: int, dim: int, splits: int, device: torch.device | str) -> Self:
        """Return buffers for up to ``tokens`` nodes in a launch."""
        acc = torch.empty(tokens, heads, splits, dim, dtype=torch.float32, device=device)
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
    tokens, heads, dim = q.shape
    kv_heads = keys.shape[2]
    out = torch.empty_like(q) if out is None else out
    if heads % kv_heads or width > min(MAX_NODES, masks.shape[1]) or (key_scale is None) != (value_scale is None):
        raise ConfigError(
            f"tree_attention: {heads} query heads over {kv_heads}, {width} nodes, masks {tuple(masks.shape)}: heads "
            f"must divide, at most {MAX_NODES} nodes fit a mask, and scales come in pairs."
        )
    if any(t.stride(-1) != 1 for t in (q, keys, values, out, masks, block_table)):
        raise ConfigError("tree_attention: the last axis of each tensor must be adjacent.")
    if tiles.splits > 1 and parts is None:
        parts = Parts.allocate(tokens, heads, dim, tiles.splits, q.device)
    if parts is not None and (parts.acc.shape[1:] != (heads, tiles.splits, dim) or parts.acc.shape[0] < tokens):
        raise ConfigError(
            f"tree_attention: parts of {tuple(parts.acc.shape)} do not fit {tokens} nodes, {heads} heads, "
            f"{tiles.splits} splits, dim {dim}."
        )
    group, block_d = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    acc, highest, total = (parts.acc, parts.highest, parts.total) if parts else (None, None, None)
    requests = seq_lens.numel()
    _part[(triton.cdiv(width * group, tiles.rows), requests * kv_heads, tiles.splits)](
        q, keys, values, block_table, seq_lens, masks, cu_nodes, key_scale, value_scale, out, acc, highest, total,
        scale * _LOG2_E, window or 0, Q_T=q.stride(0), Q_H=q.stride(1), OUT_T=out.stride(0), OUT_H=out.stride(1),
        K_B=keys.stride(0), K_S=keys.stride(1), K_H=keys.stride(2), V_B=values.stride(0), V_S=values.stride(1),
        V_H=values.stride(2), TABLE=block_table.stride(0), MASKS=masks.stride(0), SIZE=keys.shape[1], HQ=heads,
        HKV=kv_heads, D=dim, BD=block_d, BM=tiles.rows, BN=tiles.slots, SPLITS=tiles.splits,
        WINDOWED=window is not None, SCALED=key_scale is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", INTERPRETED=env.triton_interprets(),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if tiles.splits > 1:
        _merge[(width, heads, requests)](
            acc, highest, total, seq_lens, cu_nodes, out, OUT_T=out.stride(0), OUT_H=out.stride(1), HQ=heads, D=dim,
            BD=block_d, SPLITS=tiles.splits, INTERPRETED=env.triton_interprets(), num_warps=4,
        )  # fmt: skip
    return out
