"""Both in Triton: one program per row."""

import torch
import triton
import triton.language as tl

from thor_spec.kernels.tree_rows.reference import Rows


@triton.jit(do_not_specialize=["rows"])
def _lay_rows(parents, depths, slots, verified, starts, lengths, row_parents, row_lengths, offsets, path, accepted,
              rows, W: tl.constexpr, BW: tl.constexpr):  # fmt: skip
    r = tl.program_id(0)
    n = tl.arange(0, BW)
    inside = n < W
    tl.store(path + r * W + n, n, mask=inside)
    tl.store(accepted + r, 0)
    real = r < rows
    is_verified = tl.load(verified + r, mask=real, other=0) != 0
    slot = tl.load(slots + r, mask=real, other=0).to(tl.int64)
    parent = tl.load(parents + slot * W + n, mask=inside & is_verified, other=0)
    tl.store(row_parents + r * W + n, tl.where(is_verified, parent, n - 1), mask=inside)
    tl.store(row_lengths + r, tl.load(lengths + r, mask=is_verified, other=0))
    start = tl.load(starts + r, mask=is_verified, other=0).to(tl.int64)
    count = tl.load(starts + r + 1, mask=is_verified, other=0).to(tl.int64) - start
    own = inside & (n < count)
    depth = tl.load(depths + slot * W + n, mask=own, other=0).to(tl.int64)
    tl.store(offsets + start + n, depth - n, mask=own)


@triton.jit
def _path_order(order, path, accepted, slots, starts, W: tl.constexpr, BW: tl.constexpr):
    r = tl.program_id(0)
    n = tl.arange(0, BW)
    slot = tl.load(slots + r).to(tl.int64)
    start = tl.load(starts + r).to(tl.int64)
    own = n < tl.load(accepted + slot)
    node = tl.load(path + slot * W + n, mask=own, other=0).to(tl.int64)
    tl.store(order + start + n, start + node, mask=own)


def lay_rows(
    rows: Rows,
    parents: torch.Tensor,
    depths: torch.Tensor,
    slots: torch.Tensor,
    verified: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Write a step's rows; see ``reference.lay_rows``. Two launches, no synchronization."""
    width = parents.shape[1]
    rows.offsets.zero_()
    _lay_rows[(len(rows.lengths),)](
        parents, depths, slots, verified, starts, lengths, rows.row_parents, rows.lengths, rows.offsets, rows.path,
        rows.accepted, len(slots), W=width, BW=max(16, triton.next_power_of_2(width)), num_warps=1,
    )  # fmt: skip


def path_order(
    order: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor
) -> None:
    """Write whose outputs belong in each token's place; see ``reference.path_order``. One launch."""
    width = path.shape[1]
    _path_order[(len(slots),)](
        order, path, accepted, slots, starts, W=width, BW=max(16, triton.next_power_of_2(width)), num_warps=1
    )
