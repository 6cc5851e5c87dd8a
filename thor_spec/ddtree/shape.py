"""What ``--tree`` asks for: how many nodes, how deep, and where they may branch."""

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Self

from thor_spec.errors import ConfigError

MAX_DRAFTS = 63
"""A node's ancestors are the bits of a 64-bit word, the root's among them."""
AUTO_DRAFTS = 32
"""Most nodes of ``auto``, unless it says otherwise: every step schedules room for them, and records them."""
_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """The trees of one engine: every request's has the same number of nodes, so that a captured graph serves all."""

    nodes: int
    """Drafted nodes, the root not counted."""
    depth: int | None = None
    """Most drafts on one path; None: as many positions as the drafter has, and nodes."""
    widths: tuple[int, ...] = ()
    """Children of each node, by level; empty: the likeliest prefixes, chosen anew in every step (DDTree)."""
    auto: bool = False
    """Each step verifies as many of the nodes as pay, as a tree or as a chain."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return what ``off``, ``auto``, ``N``, ``N,depth`` or widths such as ``3,3,3`` mean; None for ``off``.

        Two numbers are nodes and depth; two levels are written ``3x3``; ``auto,48`` is never more than 48 nodes.
        Raises: ConfigError.
        """
        if text == "off":
            return None
        kind, comma, most = text.partition(",")
        if kind == "auto" and (most.isdecimal() or not comma):
            return cls(nodes=int(most or AUTO_DRAFTS), auto=True)
        apart = text.split("x" if "x" in text else ",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in apart):
            raise ConfigError(f"--tree {text} is none of off, auto, auto,N, N, N,DEPTH and widths such as 3,3,3.")
        numbers = tuple(int(part) for part in apart)
        if "x" in text or len(numbers) > 2:
            return cls(nodes=sum(accumulate(numbers, mul)), depth=len(numbers), widths=numbers)
        return cls(nodes=numbers[0], depth=numbers[1] if len(numbers) == 2 else None)

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_DRAFTS:
            raise ConfigError(
                f"A tree of {self.nodes} nodes does not fit: at most {MAX_DRAFTS} can be verified at once."
            )
        if self.depth is not None and not 1 <= self.depth <= self.nodes:
            raise ConfigError(f"A tree of {self.nodes} nodes cannot be {self.depth} deep.")

    def deep(self, positions: int) -> int:
        """Return the draft positions that trees use of a drafter's ``positions``. Raises: ConfigError, if too few."""
        if self.depth is not None and self.depth > positions:
            raise ConfigError(f"--tree wants paths of {self.depth} drafts; the drafter drafts {positions}.")
        return self.depth or min(positions, self.nodes)

    def sizes(self, positions: int) -> tuple[int, ...]:
        """Return the numbers of nodes that steps of ``auto`` may verify, rising: the whole chain among them.

        Few, since a graph is captured for each; the costs of what lies between are those of the next larger one.
        """
        chain = self.deep(positions)
        return tuple(sorted({size for size in (*_SIZES, chain, self.nodes) if size <= self.nodes}))

    def candidates(self) -> int:
        """Return how many tokens of each draft position can be used."""
        return (
            max(self.widths) if self.widths else min(self.nodes, 16)
        )  # rank 17 of a position has not been seen to help

    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return parent, depth and rank among its siblings of each node of fixed widths, level by level, root first."""
        parents, depths, ranks = [-1], [0], [0]
        level = [0]
        for depth, width in enumerate(self.widths, start=1):
            first = len(parents)
            for parent in level:
                parents += [parent] * width
                ranks += range(width)
            depths += [depth] * (len(parents) - first)
            level = list(range(first, len(parents)))
        return tuple(parents), tuple(depths), tuple(ranks)
