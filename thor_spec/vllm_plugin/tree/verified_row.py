"""A row of the batch that was verified, as those who look at it want it."""

from itertools import pairwise

import torch


class VerifiedRow:
    """What was drafted for one request, as plain lists: by node; the root's parent and that of padding is -1."""

    def __init__(self, row: int, slot: int, start: int, count: int, context: int, parents: list[int]) -> None:
        self.row, self.slot, self.start, self.count, self.context = row, slot, start, count, context
        self.parents = parents
        self.states: dict[tuple[str, int], torch.Tensor] = {}
        self.accepted = [0]

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to this one."""
        found = [node]
        while (parent := self.parents[found[0]]) >= 0:
            found.insert(0, parent)
        return found

    @property
    def depths(self) -> list[int]:
        """By node; 0 is the root's."""
        return [len(self.path(node)) - 1 for node in range(self.count)]

    @property
    def is_chain(self) -> bool:
        """Whether every node goes on where the one before it ended."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents) if parent >= 0)

    @property
    def run(self) -> int:
        """Nodes of a chain; what follows is padding."""
        return next((node for node in range(1, self.count) if self.parents[node] < 0), self.count)

    def leaves(self) -> list[list[int]]:
        """Return the path to every node without children."""
        inner = set(self.parents)
        return [self.path(node) for node in range(self.count) if node not in inner]

    def siblings(self) -> list[tuple[int, int]]:
        """Return pairs of nodes with one parent, each with the next."""
        by_parent: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                by_parent.setdefault(parent, []).append(node)
        return [pair for nodes in by_parent.values() for pair in pairwise(nodes)]
