"""Definition of the walk over a batch of trees, in torch without a loop over requests.

Shapes: S request slots, R requests of the batch, L rows of logits, N drafted nodes of a tree, W = N + 1.
"""

from dataclasses import dataclass

import torch

OF_TREES = ("nodes", "depth", "accepted")
"""What is counted of each tree with drafts: its drafted nodes, its longest path, and the drafts that were accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Trees by request slot, and what became of them by row of the batch."""

    parents: torch.Tensor
    """[S, W], int32; -1 for the root, and for nodes that are none."""
    depths: torch.Tensor
    """[S, W], int32."""
    path: torch.Tensor
    """Accepted nodes, root first, and then the nodes whose place it is; written [R or more, W], int32."""
    accepted: torch.Tensor
    """Their number; written [R or more], int32."""
    counts: torch.Tensor
    """Added to: trees by the number of what ``OF_TREES`` names [3, W], int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """What requests emit."""

    tokens: torch.Tensor
    """The accepted drafts and one token more; 0 behind them [R, W], int64."""
    counts: torch.Tensor
    """Their number [R], int32."""
    order: torch.Tensor
    """Rows of logits with those of each accepted path at its front [L], int64."""


def tree_walk(
    trees: Trees,
    drafts: torch.Tensor,
    choices: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    likely: torch.Tensor | None = None,
) -> Walked:
    """Walk each tree from its root: a child that carries the target's choice is accepted, until there is none.

    Args:
        drafts: tokens of the nodes, request after request; -1: not to be accepted [L].
        choices: the target's next token at each node [L].
        starts: first row of each request, and the number of rows [R + 1]; rows are at most W.
        slots: of the requests [R].
        likely: the target's probability of each node's token where its request's rule takes it, else 0 [R, W],
            float32; None: no request is relaxed. Where no child carries the choice, the likeliest such child is
            accepted, of equal ones the first.
    """
    slots, starts = slots.long(), starts.long()
    parents, depths = trees.parents[slots], trees.depths[slots].long()
    width = parents.shape[1]
    node = torch.arange(width, device=parents.device)
    inside = node < starts.diff()[:, None]
    at = torch.where(inside, starts[:-1, None] + node, 0)
    tokens = torch.where(inside, drafts[at].long(), -1)
    chosen = choices[at].long()
    hop = parents.clamp(min=0).long()
    is_real = (parents >= 0) & (tokens >= 0)
    reached = is_real & (tokens == chosen.gather(1, hop))
    if likely is not None:
        worth = torch.where(reached, 2.0, torch.where(is_real, likely, 0.0))
        best = torch.zeros_like(worth).scatter_reduce(1, hop, worth, "amax")
        reached = (worth > 0) & (worth == best.gather(1, hop))
        first = torch.where(reached, node, width)  # of equal ones
        reached &= node == torch.full_like(hop, width).scatter_reduce(1, hop, first, "amin").gather(1, hop)
    reached[:, 0] = True
    for _ in range((width - 1).bit_length()):  # a node is reached if its whole path is
        reached = reached & reached.gather(1, hop)
        hop = hop.gather(1, hop)
    # Children of a node carry different tokens, so that what is reached is one path: one node of each depth.
    path = torch.cat([node, node[:1]]).repeat(len(parents), 1)
    path.scatter_(1, torch.where(reached, depths, width), node.expand_as(reached))
    path, accepted = path[:, :width], reached.sum(1)
    rows = len(slots)
    trees.path[:rows], trees.accepted[:rows] = path.to(torch.int32), accepted.to(torch.int32)
    nodes = inside.sum(1) - 1
    found = torch.stack([nodes, torch.where(inside, depths, 0).amax(1), accepted - 1])
    places = found + torch.arange(len(found), device=found.device)[:, None] * width
    trees.counts.view(-1).scatter_add_(0, places.flatten(), (nodes > 0).long().repeat(len(found)))
    onward = tokens.gather(1, path.roll(-1, 1))
    emitted = torch.where(node < accepted[:, None] - 1, onward, chosen.gather(1, path))
    order = torch.arange(len(drafts), device=drafts.device)
    order[at[inside]] = (starts[:-1, None] + torch.where(node < accepted[:, None], path, node))[inside]
    return Walked(
        tokens=torch.where(node < accepted[:, None], emitted, 0), counts=accepted.to(torch.int32), order=order
    )
