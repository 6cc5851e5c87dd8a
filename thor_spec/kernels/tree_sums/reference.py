"""Definition of the sums, in torch.

Shapes: R requests, N drafted nodes, K draft positions, W candidates of a position.
"""

import torch


def tree_sums(
    nodes: torch.Tensor, scores: torch.Tensor, sampled: torch.Tensor, accepted: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Return sums over the requests that have emitted tokens [N + K + 2], float32.

    Those are: prefix probabilities of the nodes of trees, and of chains; accepted drafts of the last step; requests.

    Args:
        nodes: log probability of each node's prefix [R, N], float32.
        scores: log probabilities of each position's candidates, likeliest first [R, K, W], float32.
        sampled: tokens that each request has emitted [R].
        accepted: nodes of each slot's accepted path, the root's included; 0: nothing was verified.
        slots: of the requests [R].
    """
    last = (accepted[slots.long()] - 1).clamp(min=0)
    chain = scores[:, :, 0].cumsum(1)
    found = torch.cat([nodes.exp(), chain.exp(), last[:, None].float(), torch.ones_like(nodes[:, :1])], dim=1)
    return found[sampled[: len(nodes)] > 0].sum(0)
