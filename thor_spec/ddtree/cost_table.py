"""What steps cost on this machine: measured at start-up, and again in every step.

Shapes of a step: its rows (requests that verify), the tokens of their context, and the drafted nodes of each.
"""

from collections import deque
from statistics import median

from thor_spec.ddtree.budget import Costs, isotonic

SEED = 8.0
"""Steps that a measurement of the start-up is worth."""
MEMORY = 64.0
"""Steps that a mean goes back at most."""
SHORTEST = 256
"""Contexts up to this many tokens count as equal; beyond, those between two powers of two."""
RESTS, FEW = 64, 8


class CostTable:
    """Seconds of verification by rows, context and nodes, and of the rest of a step."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        """``sizes``: numbers of nodes that a step may have, rising."""
        self.sizes = sizes
        self._seeds: dict[int, dict[int, tuple[float, ...]]] = {}  # rows, context, seconds by size
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._rests: deque[float] = deque(maxlen=RESTS)
        self._rest = 0.0

    def seed(self, rows: int, context: int, seconds: tuple[float, ...]) -> None:
        """Take what the start-up measured, by size."""
        self._seeds.setdefault(rows, {})[context] = tuple(isotonic(seconds, [1.0] * len(seconds)))
        self._cells.clear()

    def learn(self, rows: int, context: int, nodes: int, seconds: float) -> None:
        """Take a step's verification; sizes that are none are not looked at."""
        if nodes in self.sizes:
            self._cell(rows, context).add(self.sizes.index(nodes), seconds)

    def learn_rest(self, seconds: float) -> None:
        """Take what a step took beside its verification: drafting, building, committing, and waiting for the host."""
        self._rests.append(seconds)
        if len(self._rests) < FEW or len(self._rests) % FEW == 0:
            self._rest = median(self._rests)  # a pause between two requests is none of it

    def at(self, rows: int, context: int) -> Costs:
        """Return the costs of a step."""
        return Costs(self._rest, self.sizes, self._cell(rows, context).fitted())

    def _cell(self, rows: int, context: int) -> "_Cell":
        top = max(SHORTEST, 1 << max(context - 1, 0).bit_length())
        if (rows, top) not in self._cells:
            self._cells[rows, top] = _Cell(self._expected(rows, top * 3 // 4 if top > SHORTEST else top // 2))
        return self._cells[rows, top]

    def _expected(self, rows: int, context: int) -> tuple[float, ...]:
        """Interpolate between what the start-up measured; all sizes alike, if it has measured nothing."""
        if not self._seeds:
            return (1.0,) * len(self.sizes)
        by_rows = {known: _between(context, curves) for known, curves in self._seeds.items()}
        return _between(rows, by_rows)


class _Cell:
    """Steps of one number of rows and about one context."""

    def __init__(self, seeds: tuple[float, ...]) -> None:
        self._seeds = seeds
        self._means = [0.0] * len(seeds)
        self._counts = [0.0] * len(seeds)
        self._fitted: tuple[float, ...] | None = None

    def add(self, at: int, seconds: float) -> None:
        self._counts[at] = min(self._counts[at] + 1, MEMORY)
        self._means[at] += (seconds - self._means[at]) / self._counts[at]
        self._fitted = None

    def fitted(self) -> tuple[float, ...]:
        """Return seconds by size. Sizes without steps are as far off their seeds as those with steps are together."""
        if self._fitted is None:
            seen = sum(n * seed for n, seed in zip(self._counts, self._seeds, strict=True))
            scale = sum(n * mean for n, mean in zip(self._counts, self._means, strict=True)) / seen if seen else 1.0
            mixed = [
                (SEED * scale * seed + n * mean) / (SEED + n)
                for seed, n, mean in zip(self._seeds, self._counts, self._means, strict=True)
            ]
            self._fitted = tuple(isotonic(mixed, [SEED + n for n in self._counts]))
        return self._fitted


def _between(at: int, known: dict[int, tuple[float, ...]]) -> tuple[float, ...]:
    """Interpolate linearly, element by element; beyond the ends, the ends."""
    low = max((x for x in known if x <= at), default=min(known))
    high = min((x for x in known if x >= at), default=max(known))
    if low == high:
        return known[low]
    share = (at - low) / (high - low)
    return tuple(a + share * (b - a) for a, b in zip(known[low], known[high], strict=True))
