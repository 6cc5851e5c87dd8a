"""Definition of the ancestor masks of a batch of trees.

Shapes: R requests, T nodes of all requests together, W nodes of the largest tree that buffers hold (at most 64).
"""

from dataclasses import dataclass

import torch

MAX_NODES = 64  # one bit each in a 64-bit word


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePaths:
    """Who descends from whom, for each request of a batch."""

    masks: torch.Tensor
    """Bit i of ``masks[r, t]`` is set if node i lies on the path from the root to node t, t included [R, W], int64."""
    leaves: torch.Tensor
    """Bit t is set if node t has no child [R], int64."""


def tree_paths(parents: torch.Tensor, cu_nodes: torch.Tensor, *, out: TreePaths | None = None) -> TreePaths:
    """Return masks and leaves of trees given by parent indices.

    ``mask[t] = bit t | mask[parent[t]]``

    Args:
        parents: [R, W], integers, any topological order (a parent's index is below its child's). A parent outside
            ``0..t-1`` makes node t a root of its own, as padding nodes are.
        cu_nodes: [R + 1], integers: request r has ``cu_nodes[r + 1] - cu_nodes[r]`` nodes; more than W count as W.

    Nodes beyond a request's own get an empty mask.
    """
    requests, width = parents.shape
    out = out or allocate(requests, width, parents.device)
    out.masks.zero_()
    out.leaves.zero_()
    for r in range(requests):
        count = min(int(cu_nodes[r + 1] - cu_nodes[r]), width)
        masks: list[int] = []
        inner = 0
        for t in range(count):
            parent = int(parents[r, t])
            known = 0 <= parent < t
            masks.append(1 << t | (masks[parent] if known else 0))
            inner |= 1 << parent if known else 0
        for t, mask in enumerate(masks):
            out.masks[r, t] = _signed(mask)
        out.leaves[r] = _signed(((1 << count) - 1) & ~inner)
    return out


def by_doubling(parents: torch.Tensor, cu_nodes: torch.Tensor, *, out: TreePaths) -> None:
    """Write the same into the first R rows of ``out`` without a loop over nodes."""
    rows, width = parents.shape
    nodes = torch.arange(width, device=parents.device)
    own = nodes < cu_nodes.diff()[:, None]
    bits = torch.ones(width, dtype=torch.int64, device=parents.device) << nodes
    has_parent = (parents >= 0) & (parents < nodes)
    hop = torch.where(has_parent, parents, nodes).long()
    inner = torch.zeros(rows, width, dtype=torch.bool, device=parents.device)
    inner[(has_parent & own).nonzero(as_tuple=True)[0], hop[has_parent & own]] = True
    masks = bits.repeat(rows, 1)
    for _ in range((width - 1).bit_length()):
        masks = masks | masks.gather(1, hop)
        hop = hop.gather(1, hop)
    out.masks[:rows] = torch.where(own, masks, 0)
    out.leaves[:rows] = torch.where(own & ~inner, bits, 0).sum(1)


def allocate(requests: int, width: int, device: torch.device | str) -> TreePaths:
    """Return buffers for ``requests`` trees of up to ``width`` nodes."""
    return TreePaths(
        masks=torch.empty(requests, width, dtype=torch.int64, device=device),
        leaves=torch.empty(requests, dtype=torch.int64, device=device),
    )


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits
