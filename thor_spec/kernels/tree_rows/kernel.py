"""Both in Triton: one program per row."""

import torch
import triton
import triton.language as tl

from thor_spec.kernels.tree_paths.kernel import ancestors
from thor_spec.kernels.tree_rows.reference import Rows

BLOCK = 512


@triton.jit(do_not_specialize=["rows", "tokens"])
def _lay_rows(parents, depths, slots, verified, starts, lengths, linear, row_parents, masks, leaves, row_lengths,
              offsets, positions, path, accepted, rows, tokens, W: tl.constexpr, BT: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    r = tl.program_id(0)
    padding = r == tl.num_programs(0) - 1  # the last program has no row, but the tokens behind those of all rows
    in_use = r < rows
    n = tl.arange(0, BT)
    inside = (n < W) & (padding == 0)
    tl.store(path + r * W + n, n, mask=inside)
    tl.store(accepted + r, 0, mask=padding == 0)
    is_verified = tl.load(verified + r, mask=in_use, other=0) != 0
    slot = tl.load(slots + r, mask=in_use, other=0).to(tl.int64)
    parent = tl.load(parents + slot * W + n, mask=inside & is_verified, other=0)
    parent = tl.where(is_verified, parent, n - 1)
    tl.store(row_parents + r * W + n, parent, mask=inside)
    tl.store(row_lengths + r, tl.load(lengths + r, mask=is_verified, other=0), mask=padding == 0)
    first = tl.load(starts + tl.minimum(r, rows)).to(tl.int32)
    end = tl.load(starts + r + 1, mask=in_use, other=0).to(tl.int32)
    end = tl.where(in_use, end, tl.where(padding, tokens, first))
    own = inside & in_use & (n < end - first)
    mask, last = ancestors(parent, own, n, BT)
    tl.store(masks + r * W + n, mask, mask=inside & in_use)
    tl.store(leaves + r, last, mask=in_use)
    own = own & is_verified
    in_a_line = tl.load(linear + first + n, mask=own, other=0).to(tl.int64)
    position = in_a_line - n + tl.load(depths + slot * W + n, mask=own, other=0)
    position = tl.maximum(position, 0)  # rows of dummy runs have no context
    tl.store(offsets + first + n, position - in_a_line, mask=own)
    tl.store(positions + first + n, position, mask=own)
    for at in range(tl.where(is_verified, end, first), end, BLOCK):
        t = at + tl.arange(0, BLOCK)
        tl.store(offsets + t, tl.zeros([BLOCK], tl.int64), mask=t < end)
        tl.store(positions + t, tl.load(linear + t, mask=t < end, other=0), mask=t < end)


@triton.jit
def _path_order(order, path, accepted, starts, W: tl.constexpr, BW: tl.constexpr):
    r = tl.program_id(0)
    n = tl.arange(0, BW)
    start = tl.load(starts + r).to(tl.int64)
    own = n < tl.load(accepted + r)
    node = tl.load(path + r * W + n, mask=own, other=0).to(tl.int64)
    tl.store(order + start + n, start + node, mask=own)


def lay_rows(
    rows: Rows,
    parents: torch.Tensor,
    depths: torch.Tensor,
    slots: torch.Tensor,
    verified: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    linear: torch.Tensor,
) -> None:
    """Write a step's rows; see ``reference.lay_rows``. One launch, no synchronization."""
    width = parents.shape[1]
    _lay_rows[(len(rows.lengths) + 1,)](
        parents, depths, slots, verified, starts, lengths, linear, rows.row_parents, rows.paths.masks,
        rows.paths.leaves, rows.lengths, rows.offsets, rows.positions, rows.path, rows.accepted, len(slots),
        len(linear), W=width, BT=max(16, triton.next_power_of_2(width)), BLOCK=BLOCK,
    )  # fmt: skip


def path_order(order: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor, starts: torch.Tensor) -> None:
    """Write whose outputs belong in each token's place; see ``reference.path_order``. One launch."""
    rows, width = path.shape
    _path_order[(rows,)](order, path, accepted, starts, W=width, BW=max(16, triton.next_power_of_2(width)), num_warps=1)
