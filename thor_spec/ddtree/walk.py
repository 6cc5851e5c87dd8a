"""Which drafts of a tree the target accepts."""

from collections.abc import Sequence

from thor_spec.ddtree.tree import Tree


def walk(tree: Tree, choices: Sequence[int]) -> tuple[int, ...]:
    """Return the accepted nodes, root first.

    Args:
        choices: the target's own next token at every node, greedy or sampled; its choice at a node depends on nothing
            but the path to it. Lossless either way: the tokens of the path and then ``choices[path[-1]]`` are what
            the target alone would have emitted.
    """
    path = [0]
    for node in range(1, len(tree.tokens)):
        if tree.parents[node] == path[-1] and tree.tokens[node] == choices[path[-1]]:
            path.append(node)
    return tuple(path)
