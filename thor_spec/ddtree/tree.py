"""A draft tree: tokens with parents, in an order in which every prefix is a tree again."""

from collections.abc import Sequence
from dataclasses import dataclass

from thor_spec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Node 0 is the root, the last emitted token; every other node's parent stands before it.

    So whatever number of nodes a scheduler cuts off at the end, the rest is a tree.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """``parents[0]`` is -1."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or not self.tokens or self.parents[0] != -1:
            raise ConfigError(f"A tree needs one parent per token and a root: {self.tokens=}, {self.parents=}.")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ConfigError(f"The parent of node {node} is {parent}; it must stand before its child.")
        edges = list(zip(self.parents, self.tokens, strict=True))
        if len(set(edges)) != len(edges):
            raise ConfigError(f"Two children of one node carry the same token: {self.tokens=}, {self.parents=}.")

    def depths(self) -> tuple[int, ...]:
        """Return each node's distance from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    def ancestors(self) -> tuple[int, ...]:
        """Return per node a bit mask of the nodes on its path from the root, itself included."""
        masks = [1]
        for node, parent in enumerate(self.parents[1:], start=1):
            masks.append(masks[parent] | 1 << node)
        return tuple(masks)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root to ``node``."""
        path = [node]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        return tuple(reversed(path))


def chain(tokens: Sequence[int]) -> Tree:
    """Return the tree of width 1 that drafts ``tokens[1:]`` after ``tokens[0]``."""
    return Tree(tokens=tuple(tokens), parents=tuple(range(-1, len(tokens) - 1)))
