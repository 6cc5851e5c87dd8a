"""Definition of both, in torch.

Shapes: S request slots and at most as many rows, R rows in use, T tokens, W nodes of a tree with its root.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Buffers that keep their addresses, since graphs read them."""

    row_parents: torch.Tensor
    """Of each row's nodes; a chain where it verifies nothing [S, W], int32."""
    lengths: torch.Tensor
    """Cache slots in use, its own included, of a row that verifies; 0 for others [S], int32."""
    offsets: torch.Tensor
    """What to add to each token's linear position: its depth less its place [T], int64."""
    path: torch.Tensor
    """Accepted nodes by slot; each its own place, before anything is accepted [S, W], int32."""
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
) -> None:
    """Write a step's rows, and forget the last step's.

    Args:
        parents, depths: of the trees by slot [S, W], int32.
        slots: of the rows [R].
        verified: whether a row's tokens are a root and its drafts [R], bool.
        starts: first token of each row, and the number of tokens [R + 1 or more].
        lengths: cache slots in use of each row [R or more].
    """
    count, width = len(slots), parents.shape[1]
    node = torch.arange(width, device=parents.device)
    slots, starts = slots.long(), starts[: count + 1].long()
    rows.path.copy_(node.expand_as(rows.path))
    rows.accepted.zero_()
    rows.row_parents.copy_((node - 1).expand_as(rows.row_parents))
    rows.row_parents[:count] = torch.where(verified[:, None], parents[slots], node.to(torch.int32) - 1)
    rows.lengths.zero_()
    rows.lengths[:count] = torch.where(verified, lengths[:count], 0)
    rows.offsets.zero_()
    inside = verified[:, None] & (node < starts.diff()[:, None])
    rows.offsets[(starts[:-1, None] + node)[inside]] = (depths[slots].long() - node)[inside]


def path_order(
    order: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor
) -> None:
    """Write whose outputs belong in each token's place: those of accepted paths come to the front of their rows.

    Args:
        order: 0 to T - 1 before [T], int64.
        path, accepted: by slot, as in ``Rows``.
        slots: of the rows [R].
        starts: first token of each row, and the number of tokens [R + 1 or more].
    """
    count, width = len(slots), path.shape[1]
    slots, starts = slots.long(), starts[: count + 1].long()
    node = torch.arange(width, device=path.device)
    inside = node < accepted[slots][:, None]
    order[(starts[:-1, None] + node)[inside]] = (starts[:-1, None] + path[slots])[inside]
