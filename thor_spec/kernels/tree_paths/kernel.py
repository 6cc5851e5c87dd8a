"""Ancestor masks by pointer doubling: six rounds reach 64 generations, without a loop over nodes."""

import torch
import triton
import triton.language as tl

from thor_spec.errors import ConfigError
from thor_spec.kernels.tree_paths.reference import MAX_NODES, TreePaths, allocate


@triton.jit
def ancestors(parent, own, t, BT: tl.constexpr):
    """Return the masks of a tree's nodes ``t`` [BT], and its leaves; ``own`` says which nodes there are."""
    parent = tl.where(own & (parent >= 0) & (parent < t), parent, -1)
    child_of = parent[:, None] == t[None, :]
    inner = tl.max(child_of.to(tl.int32), axis=0) > 0
    bit = tl.full([BT], 1, tl.int64) << t.to(tl.int64)
    leaves = tl.sum(tl.where(own & (inner == 0), bit, 0), axis=0)
    mask = tl.where(own, bit, 0)
    hop = parent
    span = 1
    while span < BT:
        lands = hop[:, None] == t[None, :]
        mask = mask | tl.sum(tl.where(lands, mask[None, :], 0), axis=1)
        hop = tl.max(tl.where(lands, hop[None, :], -1), axis=1)
        span *= 2
    return mask, leaves


@triton.jit
def _tree_paths(parents, cu_nodes, masks, leaves, parents_stride, WIDTH: tl.constexpr, BT: tl.constexpr):
    r = tl.program_id(0)
    t = tl.arange(0, BT)
    count = tl.minimum((tl.load(cu_nodes + r + 1) - tl.load(cu_nodes + r)).to(tl.int32), WIDTH)
    own = t < count
    parent = tl.load(parents + r * parents_stride + t, mask=own, other=-1).to(tl.int32)
    mask, last = ancestors(parent, own, t, BT)
    tl.store(leaves + r, last)
    tl.store(masks + r * WIDTH + t, mask, mask=t < WIDTH)


def tree_paths(parents: torch.Tensor, cu_nodes: torch.Tensor, *, out: TreePaths | None = None) -> TreePaths:
    """Return masks and leaves; see ``reference.tree_paths``. One launch, no synchronization."""
    requests, width = parents.shape
    if width > MAX_NODES or parents.stride(1) != 1:
        raise ConfigError(f"parents [{requests}, {width}] must have rows of at most {MAX_NODES} adjacent entries.")
    out = out or allocate(requests, width, parents.device)
    _tree_paths[(requests,)](
        parents,
        cu_nodes,
        out.masks,
        out.leaves,
        parents.stride(0),
        WIDTH=width,
        BT=max(16, triton.next_power_of_2(width)),
    )
    return out
