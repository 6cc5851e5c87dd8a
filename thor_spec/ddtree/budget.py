"""How many nodes a step should verify: accepted tokens against time (CaDDTree, arXiv:2606.01813).

The paper fits a convex cost and stops at the first fall. On mixtures of experts the cost is concave, and then the first
fall is not the best: so costs are fitted by isotonic regression here, and every number of nodes is looked at.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

NEWS = 0.15
"""Share of one step in what is expected of the next."""


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest to ``values`` in weighted squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] >= mean:
            before, heavy, count = blocks.pop()
            mean = (before * heavy + mean * total) / (heavy + total)
            total, length = heavy + total, length + count
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one step by the number of drafted nodes: drafting, and verifying them with the root."""

    draft: float
    sizes: tuple[int, ...]
    """Numbers of nodes that were measured, rising."""
    verify: tuple[float, ...]
    """Seconds at each, non-decreasing."""

    @classmethod
    def fit(cls, draft: float, measured: Sequence[tuple[int, float]]) -> "Costs":
        """Fit measurements (nodes, seconds), any number of each size."""
        sizes = sorted({nodes for nodes, _ in measured})
        of_size = [[seconds for nodes, seconds in measured if nodes == size] for size in sizes]
        means = [sum(seconds) / len(seconds) for seconds in of_size]
        return cls(draft, tuple(sizes), tuple(isotonic(means, [len(seconds) for seconds in of_size])))

    def of(self, nodes: int) -> float:
        """Return the seconds of a step of ``nodes`` nodes: those of the next larger size, since graphs are padded."""
        at = min(bisect_left(self.sizes, nodes), len(self.sizes) - 1)
        return (self.draft if nodes else 0.0) + self.verify[at]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a step drafts."""

    nodes: int
    chain: bool
    rate: float
    """Expected tokens per second of each request."""


def choose(prefix_probabilities: Sequence[float], costs: Costs, *, trust: float = 1.0, fewest: int = 0) -> Choice:
    """Return the number of nodes with the most expected tokens per second; 0: none.

    Args:
        prefix_probabilities: of the nodes in the order in which trees admit them; their sum over a tree is the
            expected number of accepted drafts.
        trust: accepted drafts per expected one, as it was lately.
        fewest: nodes that are drafted anyway.
    """
    largest = min(len(prefix_probabilities), costs.sizes[-1])
    expected = [0.0, *accumulate(prefix_probabilities[:largest])]

    def rate(nodes: int) -> float:
        return (1 + trust * expected[nodes]) / costs.of(nodes)

    lowest = min(fewest, largest)
    # Between two sizes costs are those of the larger one: no number there is better than it.
    best = max((lowest, *(size for size in costs.sizes if lowest < size < largest), largest), key=rate)
    return Choice(best, chain=False, rate=rate(best))


def tree_or_chain(
    tree: Sequence[float], chain: Sequence[float], costs: Costs, *, trust: tuple[float, float], fewest: int = 0
) -> Choice:
    """Return the better one of the best tree and the best chain; the chain, if they are equal.

    By the drafter's own probabilities no chain beats the tree of as many nodes; by what is really accepted one may.

    Args:
        tree, chain: prefix probabilities, as ``choose`` takes them.
        trust: of trees, and of chains.
    """
    branched = choose(tree, costs, trust=trust[0], fewest=fewest)
    straight = choose(chain, costs, trust=trust[1], fewest=fewest)
    if straight.rate >= branched.rate:
        return Choice(straight.nodes, chain=True, rate=straight.rate)
    return branched


def blend(old: Sequence[float], new: Sequence[float], share: float = NEWS) -> list[float]:
    """Return what to expect of the next drafts: mostly what was expected before, ``share`` of it what has come in.

    The drafts that a choice is for are not known yet, and one step's marginals say little about those of another.
    """
    return [a + share * (b - a) for a, b in zip(old, new, strict=True)] if old else list(new)


class Trust:
    """Accepted drafts per expected one, forgetting; near 1 where little is known, so that what was left gets tried."""

    PRIOR = 2.0
    """Expected drafts that are taken as accepted at the outset."""

    def __init__(self, memory: int = 200) -> None:
        """``memory``: steps after which a third of a step's weight is left."""
        self._keep = 1 - 1 / memory
        self._expected = self._accepted = 0.0

    def fade(self) -> None:
        """Forget a little; once a step, whether or not it was of this kind."""
        self._expected *= self._keep
        self._accepted *= self._keep

    def add(self, expected: float, accepted: float) -> None:
        """Take a step's drafts per request."""
        self._expected += expected
        self._accepted += accepted

    @property
    def ratio(self) -> float:
        """What to multiply expectations with."""
        return (self._accepted + self.PRIOR) / (self._expected + self.PRIOR)
