"""Definition of the trees of a batch, in torch without a loop over requests.

Shapes: R requests, K draft positions, W candidates of each position, N drafted nodes.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Node 0 of each tree is the root; every prefix of the nodes is a tree again."""

    tokens: torch.Tensor
    """Drafted tokens, nodes 1 to N [R, N], int64. Padding nodes carry some valid token."""
    parents: torch.Tensor
    """Parent of each node [R, N + 1], int32; -1: the root, and padding nodes, which nothing can accept."""
    depths: torch.Tensor
    """Distance from the root [R, N + 1], int32; 0 for padding nodes."""
    scores: torch.Tensor
    """Log probability of each node's whole prefix, nodes 1 to N [R, N], float32; ``-inf`` for padding nodes."""

    @classmethod
    def allocate(cls, requests: int, nodes: int, device: torch.device | str) -> "Trees":
        """Return buffers for ``requests`` trees."""
        return cls(
            tokens=torch.empty(requests, nodes, dtype=torch.int64, device=device),
            parents=torch.empty(requests, nodes + 1, dtype=torch.int32, device=device),
            depths=torch.empty(requests, nodes + 1, dtype=torch.int32, device=device),
            scores=torch.empty(requests, nodes, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Trees of fixed widths: of each node, the root first, all [N + 1], int32."""

    parents: torch.Tensor
    depths: torch.Tensor
    ranks: torch.Tensor
    """Place among its siblings, which is that of its token among the candidates."""


def build_trees(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    chains: torch.Tensor,
    *,
    nodes: int,
    spine: int = 0,
    straight: bool = False,
    slots: torch.Tensor | None = None,
    out: Trees | None = None,
) -> Trees:
    """Return the trees of the ``nodes`` likeliest prefixes: DDTree, as ``ddtree.best_first`` defines it.

    Args:
        scores: log probabilities of each position's candidates, likeliest first [R, K, W], float32.
        tokens: the candidates [R, K, W], integers.
        chains: whether a request gets the likeliest token of each position and nothing else [R], bool.
        nodes: how many; a tree that runs out of candidates ends in padding nodes.
        spine: depth down to which the likeliest tokens are taken first, whatever their probability.
        straight: everybody gets such a chain, but the scores are those of trees.
        slots: of the requests [R]: ``chains``, and parents and depths of ``out``, are by slot then.
        out: buffers; tokens and scores are by request.

    Of equal scores, the one that could be taken earlier wins.
    """
    requests, positions, width = scores.shape
    found = Trees.allocate(requests, nodes, scores.device)
    found.parents.fill_(-1)
    found.depths.zero_()
    row = torch.arange(requests, device=scores.device)
    chains = chains if slots is None else chains[slots.long()]

    # Slot n of the frontier holds the first child of node n, and after that was taken its siblings one after another.
    def new(dtype: torch.dtype, fill: float) -> torch.Tensor:
        return torch.full((requests, nodes + 1), fill, dtype=dtype, device=scores.device)

    base, cost = new(torch.float32, 0), new(torch.float32, -torch.inf)
    depth, rank, parent = (new(torch.int64, 0) for _ in range(3))
    cost[:, 0] = scores[:, 0, 0]
    for n in range(1, nodes + 1):
        best = cost.argmax(1)
        forced = chains if n > min(spine, positions) else torch.ones_like(chains)
        best = torch.where(forced, n - 1, best)
        at = cost[row, best]
        real = at > -torch.inf
        d, r, p = depth[row, best], rank[row, best], parent[row, best]
        found.tokens[:, n - 1] = tokens[row, d, r]
        found.parents[:, n] = torch.where(real, p, -1)
        found.depths[:, n] = torch.where(real, d + 1, 0)
        found.scores[:, n - 1] = at
        sibling = base[row, best] + scores[row, d, (r + 1).clamp(max=width - 1)]
        cost[row, best] = torch.where(real & (r + 1 < width) & ~chains, sibling, -torch.inf)
        rank[row, best] = (r + 1).clamp(max=width - 1)
        child = at + scores[row, (d + 1).clamp(max=positions - 1), 0]
        cost[:, n] = torch.where(real & (d + 1 < positions), child, -torch.inf)
        base[:, n], depth[:, n], parent[:, n] = at, (d + 1).clamp(max=positions - 1), n
    if straight:
        _lay_chains(found, tokens, torch.ones_like(chains))
    return _moved(found, slots, out)


def lay_widths(
    layout: Layout,
    tokens: torch.Tensor,
    chains: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    out: Trees | None = None,
) -> Trees:
    """Return trees of fixed widths; other arguments as those of ``build_trees``. Scores are not looked at."""
    found = Trees.allocate(len(tokens), len(layout.parents) - 1, tokens.device)
    chains = chains if slots is None else chains[slots.long()]
    found.parents.copy_(layout.parents.expand_as(found.parents))
    found.depths.copy_(layout.depths.expand_as(found.depths))
    found.tokens.copy_(tokens[:, layout.depths[1:].long() - 1, layout.ranks[1:].long()])
    _lay_chains(found, tokens, chains)
    return _moved(found, slots, out)


def _lay_chains(found: Trees, tokens: torch.Tensor, chains: torch.Tensor) -> None:
    positions = tokens.shape[1]
    node = torch.arange(found.parents.shape[1], dtype=torch.int32, device=tokens.device)
    there, one = node <= positions, chains[:, None]
    likeliest = tokens[:, (node[1:].long() - 1).clamp(max=positions - 1), 0]
    found.tokens.copy_(torch.where(one, likeliest, found.tokens))
    found.parents.copy_(torch.where(one, torch.where(there, node - 1, -1), found.parents))
    found.depths.copy_(torch.where(one, torch.where(there, node, 0), found.depths))


def _moved(found: Trees, slots: torch.Tensor | None, out: Trees | None) -> Trees:
    if out is None:
        return found
    own = torch.arange(len(found.tokens), device=found.tokens.device) if slots is None else slots.long()
    out.parents[own], out.depths[own] = found.parents, found.depths
    out.tokens[: len(own)], out.scores[: len(own)] = found.tokens, found.scores
    return out
