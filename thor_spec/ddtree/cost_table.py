"""What steps cost on this machine: passes measured at start-up, and whole steps as they come.

A step is more than its pass: it drafts, builds, commits and waits for the host, and a host that is slower than the
device hides what nodes cost. So what counts is the time from one step's begin to the next; measured passes only say how
sizes differ until steps have said so.

Shapes of a step: its rows (requests that verify), the tokens of their context, and the drafted nodes of each.
"""

from collections import deque
from math import log2

from thor_spec.ddtree.budget import Costs, isotonic

SEED = 0.5
"""Steps that what was expected before is worth."""
RECENT = 9
"""Steps whose lower quartile counts: what compiles something, or is delayed by others on the machine, is late only."""
SHORTEST = 256
"""Contexts up to this many tokens count as equal; beyond, those between two powers of two."""
LEAST_S = 1e-6


class CostTable:
    """Seconds of whole steps by rows, context and nodes."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        """``sizes``: numbers of nodes that a step may have, rising."""
        self.sizes = sizes
        self._seeds: dict[int, dict[int, tuple[float, ...]]] = {}  # rows, context, seconds by size
        self._cells: dict[tuple[int, int], _Cell] = {}

    def seed(self, rows: int, context: int, seconds: tuple[float, ...]) -> None:
        """Take what passes took at start-up, by size."""
        self._seeds.setdefault(rows, {})[context] = tuple(isotonic(seconds, [1.0] * len(seconds)))
        self._cells.clear()

    def learn(self, rows: int, context: int, nodes: int, seconds: float) -> None:
        """Take a whole step; sizes that are none are not looked at."""
        if nodes in self.sizes:
            self._cell(rows, context).add(self.sizes.index(nodes), seconds)

    def at(self, rows: int, context: int) -> Costs:
        """Return the costs of a step."""
        return Costs(0.0, self.sizes, self._cell(rows, context).fitted())

    def count(self, rows: int, context: int, nodes: int) -> int:
        """Return how many recent steps there are of this kind; none are needed of what is no size."""
        return len(self._cell(rows, context).recent[self.sizes.index(nodes)]) if nodes in self.sizes else RECENT

    def counts(self) -> tuple[int, ...]:
        """Return how many recent steps of each size there are, of any rows and context."""
        return tuple(sum(len(cell.recent[i]) for cell in self._cells.values()) for i in range(len(self.sizes)))

    def known(self) -> list[dict[str, object]]:
        """Return everything that steps have taught, for records."""
        return [
            {"rows": rows, "context": top, "steps": [len(of) for of in cell.recent], "seconds": cell.fitted()}
            for (rows, top), cell in self._cells.items()
            if any(cell.recent)
        ]

    def _cell(self, rows: int, context: int) -> "_Cell":
        top = max(SHORTEST, 1 << max(context - 1, 0).bit_length())
        if (rows, top) not in self._cells:
            self._cells[rows, top] = self._fresh(rows, top)
        return self._cells[rows, top]

    def _fresh(self, rows: int, top: int) -> "_Cell":
        """Start from the passes of the start-up, as far off as the steps of the nearest cell are."""
        seeds = self._passes(rows, top * 3 // 4 if top > SHORTEST else top // 2)
        taught = {at: cell for at, cell in self._cells.items() if any(cell.recent)}
        if not taught:
            return _Cell(seeds, seeds)
        near = taught[min(taught, key=lambda at: (abs(at[0] - rows), abs(log2(at[1] / top))))]
        pairs = zip(seeds, near.fitted(), near.seeds, strict=True)
        return _Cell(seeds, tuple(own + fitted - seed for own, fitted, seed in pairs))

    def _passes(self, rows: int, context: int) -> tuple[float, ...]:
        """Interpolate between what the start-up measured; all sizes alike, if it has measured nothing."""
        if not self._seeds:
            return (1.0,) * len(self.sizes)
        by_rows = {known: _between(context, curves) for known, curves in self._seeds.items()}
        return _between(rows, by_rows)


class _Cell:
    """Steps of one number of rows and about one context."""

    def __init__(self, seeds: tuple[float, ...], expected: tuple[float, ...]) -> None:
        self.seeds, self._expected = seeds, expected
        self.recent: tuple[deque[float], ...] = tuple(deque(maxlen=RECENT) for _ in seeds)
        self._costs = [0.0] * len(seeds)
        self._fitted: tuple[float, ...] | None = None

    def add(self, at: int, seconds: float) -> None:
        self.recent[at].append(seconds)
        self._costs[at] = sorted(self.recent[at])[len(self.recent[at]) // 4]
        self._fitted = None

    def fitted(self) -> tuple[float, ...]:
        """Return seconds by size. Sizes without steps are as far off as those with steps are together."""
        if self._fitted is None:
            counts = [len(recent) for recent in self.recent]
            off = [n * (m - x) for n, m, x in zip(counts, self._costs, self._expected, strict=True)]
            shift = sum(off) / sum(counts) if any(counts) else 0.0
            mixed = [
                max((SEED * (x + shift) + n * m) / (SEED + n), LEAST_S)
                for x, n, m in zip(self._expected, counts, self._costs, strict=True)
            ]
            self._fitted = tuple(isotonic(mixed, [SEED + n for n in counts]))
        return self._fitted


def _between(at: int, known: dict[int, tuple[float, ...]]) -> tuple[float, ...]:
    """Interpolate linearly, element by element; beyond the ends, the ends."""
    low = max((x for x in known if x <= at), default=min(known))
    high = min((x for x in known if x >= at), default=max(known))
    if low == high:
        return known[low]
    share = (at - low) / (high - low)
    return tuple(a + share * (b - a) for a, b in zip(known[low], known[high], strict=True))
