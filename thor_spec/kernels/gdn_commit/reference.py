"""Definition of committing accepted paths to recurrent states.

Shapes: R requests, P longest path that buffers hold; others as in ``gdn_verify``.
"""

import torch

from thor_spec.kernels.gdn_common.record import Record
from thor_spec.kernels.gdn_verify.reference import advance


def gdn_commit(
    state: torch.Tensor,
    state_indices: torch.Tensor,
    record: Record,
    record_indices: torch.Tensor,
    path: torch.Tensor | None,
    accepted: torch.Tensor,
) -> None:
    """Advance each state in place over the pending rows of its record and then over the accepted path.

    ``S = exp(g_i) S + u_i k_i^T`` for each row i in order.

    Args:
        state: [slots, HV, V, K]; rounded once, at the end.
        state_indices: [R]; a value <= 0 marks a padding row.
        record: as the verification left it.
        record_indices: request slot of each row [R].
        path: accepted nodes, root first [R, P]; None: a chain's first ones.
        accepted: their number [R]; 0 commits pending rows only, as before a snapshot of the state.

    The caller clears ``record.pending`` of these slots afterwards, if there is one: other layers may share it.
    Source: arXiv:2608.20961 (reconstruction), arXiv:2412.06464.
    """
    real = torch.float64 if state.dtype == torch.float64 else torch.float32
    for r, slot in enumerate(state_indices.tolist()):
        rec, first = int(record_indices[r]), 0
        if slot <= 0:
            continue
        if record.pending is not None:
            first = int(record.pending[rec])
        nodes = range(int(accepted[r])) if path is None else path[r, : int(accepted[r])].tolist()
        rows = record.ring(rec, [*range(first), *(first + node for node in nodes)])
        if rows:
            state[slot] = advance(state[slot].to(real), record, rec, rows).to(state.dtype)


def gdn_compact(
    record: Record,
    state_indices: torch.Tensor,
    record_indices: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """Close the gaps between the rows of an accepted path, right behind the rows that were pending.

    For trees with deferred commits, before ``gdn_advance``. A chain's accepted rows have no gaps.
    """
    if record.pending is None:
        return
    for r, slot in enumerate(state_indices.tolist()):
        if slot <= 0:
            continue
        rec = int(record_indices[r])
        first = int(record.pending[rec])
        nodes = path[r, : int(accepted[r])].tolist()
        source = record.ring(rec, (first + node for node in nodes))
        target = record.ring(rec, range(first, first + len(nodes)))
        for tensor in (record.k, record.k_scale, record.u, record.log_decay):
            tensor[rec, target] = tensor[rec, source].clone()


def gdn_advance(
    record: Record, state_indices: torch.Tensor, record_indices: torch.Tensor, accepted: torch.Tensor, *, period: int
) -> None:
    """Count the accepted rows as pending, and ask for a flush from ``period`` pending rows on (1: at every step).

    Rows that the verification just flushed are pending no more: the ring's start moves past them.
    """
    if record.pending is None or record.flush is None or record.start is None:
        return
    for r, slot in enumerate(state_indices.tolist()):
        if slot <= 0:
            continue
        rec = int(record_indices[r])
        kept = int(record.pending[rec])
        if record.flush[rec]:
            record.start[rec] = (int(record.start[rec]) + kept) % record.rows
            kept = 0
        record.pending[rec] = kept + int(accepted[r])
        record.flush[rec] = int(record.pending[rec] >= period)
