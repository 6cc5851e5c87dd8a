"""Definition of both, in torch.

Shapes: S rows of the largest batch, and as many request slots; R rows in use, T tokens with their padding, W nodes of a
tree with its root.
"""

from dataclasses import dataclass

import torch

from thor_spec.kernels.tree_paths.reference import TreePaths, by_doubling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Buffers by row of the batch; they keep their addresses, since graphs read them."""

    row_parents: torch.Tensor
    """Of each row's nodes; a chain where it verifies nothing [S, W], int32."""
    paths: TreePaths
    """Masks and leaves of the rows in use."""
    lengths: torch.Tensor
    """Cache slots in use, its own included, of a row that verifies; 0 for others [S], int32."""
    offsets: torch.Tensor
    """What to add to each token's linear position: its depth less its place [T or more], int64."""
    positions: torch.Tensor
    """The sum of both [T or more], int64."""
    path: torch.Tensor
    """Accepted nodes; each its own place, before anything is accepted [S, W], int32."""
    accepted: torch.Tensor
    """Their number; 0 before [S], int32."""


def lay_rows(
    rows: Rows,
    parents: torch.Tensor,
    depths: torch.Tensor,
    slots: torch.Tensor,
    verified: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    linear: torch.Tensor,
) -> None:
    """Write a step's rows, and forget the last step's.

    Rows of dummy runs have no context to stand behind; no position is below 0, whatever tree their slot held before.

    Args:
        parents, depths: of the trees by slot [S, W], int32.
        slots: of the rows [R].
        verified: whether a row's tokens are a root and its drafts [R or more], bool.
        starts: first token of each row, and the number of tokens [R + 1 or more].
        lengths: cache slots in use of each row [R or more].
        linear: positions of the tokens in a line [T], int64.
    """
    count, width, tokens = len(slots), parents.shape[1], len(linear)
    node = torch.arange(width, device=parents.device)
    slots, starts, verified = slots.long(), starts[: count + 1].long(), verified[:count]
    rows.path.copy_(node.expand_as(rows.path))
    rows.accepted.zero_()
    rows.row_parents.copy_((node - 1).expand_as(rows.row_parents))
    rows.row_parents[:count] = torch.where(verified[:, None], parents[slots], node.to(torch.int32) - 1)
    by_doubling(rows.row_parents[:count], starts, out=rows.paths)
    rows.lengths.zero_()
    rows.lengths[:count] = torch.where(verified, lengths[:count], 0)
    rows.offsets[:tokens] = 0
    inside = verified[:, None] & (node < starts.diff()[:, None])
    rows.offsets[(starts[:-1, None] + node)[inside]] = (depths[slots].long() - node)[inside]
    rows.positions[:tokens] = (linear + rows.offsets[:tokens]).clamp(min=0)
    rows.offsets[:tokens] = rows.positions[:tokens] - linear


def path_order(order: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor, starts: torch.Tensor) -> None:
    """Write whose outputs belong in each token's place: those of accepted paths come to the front of their rows.

    Args:
        order: 0 to T - 1 before [T], int64.
        path, accepted: of the rows in use, as in ``Rows`` [R, W], [R].
        starts: first token of each row, and the number of tokens [R + 1 or more].
    """
    count, width = path.shape
    starts = starts[: count + 1].long()
    node = torch.arange(width, device=path.device)
    inside = node < accepted[:, None]
    order[(starts[:-1, None] + node)[inside]] = (starts[:-1, None] + path)[inside]
