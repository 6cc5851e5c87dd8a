"""Which drafts of a tree the target accepts."""

from collections.abc import Callable, Sequence

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


def relaxed_walk(
    tree: Tree, choices: Sequence[int], p: Callable[[int, int], float], thresholds: Sequence[float]
) -> tuple[int, ...]:
    """Return the accepted nodes, root first, where likely drafts are accepted, too. Not lossless.

    At each node, the child with the target's own choice is accepted; if there is none, the likeliest child whose
    probability reaches the threshold, of equal ones the first.

    Args:
        p: the target's probability, at a node, of a token.
        thresholds: at each node; 0 or less: its own choice alone. ``dflash.acceptance`` has the rules.
    """
    path = [0]
    while children := [node for node, parent in enumerate(tree.parents) if parent == path[-1]]:
        at = path[-1]
        own = [node for node in children if tree.tokens[node] == choices[at]]
        likely = [node for node in children if p(at, tree.tokens[node]) >= thresholds[at] > 0]
        if not own and not likely:
            break
        path.append(own[0] if own else max(likely, key=lambda node: (p(path[-1], tree.tokens[node]), -node)))
    return tuple(path)
