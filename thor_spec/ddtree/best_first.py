"""The tree with the largest expected number of accepted drafts under a node budget (DDTree, arXiv:2604.12989)."""

import heapq
from collections.abc import Sequence

from thor_spec.ddtree.tree import Tree

LogMarginals = Sequence[Sequence[tuple[int, float]]]
"""Per draft position the candidate tokens with their log probabilities, likeliest first."""


def build(root: int, marginals: LogMarginals, drafts: int) -> Tree:
    """Return a tree of at most ``drafts`` nodes below ``root``, in the order of falling prefix probability.

    A block drafter gives each position's distribution without knowing its predecessors. Then the expected length of
    what is accepted is the sum of the prefix probabilities of the nodes, so the likeliest prefixes are the best tree.
    A prefix is never less likely than its extensions, nor than its next sibling: a heap finds them in order, with one
    push of a sibling and one of a child for every node taken.
    """
    tokens, parents = [root], [-1]
    # (-log probability of the prefix, tie-breaker: ranks along the path, parent node)
    heap: list[tuple[float, tuple[int, ...], int]] = []
    if marginals and marginals[0]:
        heapq.heappush(heap, (-marginals[0][0][1], (0,), 0))
    while heap and len(tokens) <= drafts:
        cost, ranks, parent = heapq.heappop(heap)
        depth, rank = len(ranks) - 1, ranks[-1]
        node = len(tokens)
        tokens.append(marginals[depth][rank][0])
        parents.append(parent)
        if rank + 1 < len(marginals[depth]):
            sibling = cost + marginals[depth][rank][1] - marginals[depth][rank + 1][1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1), parent))
        if depth + 1 < len(marginals) and marginals[depth + 1]:
            heapq.heappush(heap, (cost - marginals[depth + 1][0][1], (*ranks, 0), node))
    return Tree(tokens=tuple(tokens), parents=tuple(parents))
