"""How many nodes a step should verify: accepted tokens against time (CaDDTree, arXiv:2606.01813).

The paper fits a convex cost and stops at the first fall. On mixtures of experts the cost is concave, and then the first
fall is not the best: so costs are fitted by isotonic regression here, and every number of nodes is looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


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
        at = next((i for i, size in enumerate(self.sizes) if size >= nodes), len(self.sizes) - 1)
        return (self.draft if nodes else 0.0) + self.verify[at]


def choose(prefix_probabilities: Sequence[float], costs: Costs) -> int:
    """Return the number of nodes with the most expected tokens per second; 0: none.

    Args:
        prefix_probabilities: of the nodes in the order in which trees admit them; their sum over a tree is the
            expected number of accepted drafts.
    """
    largest = min(len(prefix_probabilities), costs.sizes[-1])
    expected = [0.0, *accumulate(prefix_probabilities[:largest])]
    return max(range(largest + 1), key=lambda n: (1 + expected[n]) / costs.of(n))
