"""Definition of the sums, in torch.

Shapes: R requests, N drafted nodes, K draft positions, W candidates of a position.
"""

import torch


def tree_sums(
    nodes: torch.Tensor,
    scores: torch.Tensor,
    sampled: torch.Tensor,
    accepted: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return sums over the requests that have emitted tokens [N + K + 2], float32; in ``out``, if that is given.

    Those are: prefix probabilities of the nodes of trees, and of chains; accepted drafts of the last step; requests.

    Args:
        nodes: log probability of each node's prefix [R, N], float32.
        scores: log probabilities of each position's candidates, likeliest first [R, K, W], float32.
        sampled: tokens that each request has emitted [R or more].
        accepted: nodes of each request's accepted path, the root's included; 0: nothing was verified [R or more].
    """
    rows = len(nodes)
    last = (accepted[:rows] - 1).clamp(min=0)
    chain = scores[:, :, 0].cumsum(1)
    found = torch.cat([nodes.exp(), chain.exp(), last[:, None].float(), torch.ones_like(nodes[:, :1])], dim=1)
    total = found[sampled[:rows] > 0].sum(0)
    return total if out is None else out.copy_(total)
