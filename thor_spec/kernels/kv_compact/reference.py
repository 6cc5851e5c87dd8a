"""Definition of moving accepted nodes' cache entries.

Shapes: L buffers (keys and values of all layers), B blocks of S slots each, HKV heads, D head dim, R requests,
T nodes of all requests together, P longest path.
"""

from collections.abc import Sequence

import torch


def kv_compact(
    buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    cu_nodes: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    """Move, in every buffer, the entry of the accepted node of depth d to the slot of node d.

    ``buffer[slots[d]] = buffer[slots[path[d]]]`` for all d < accepted, as if all were read before any is written. Keys
    carry their rotation already: a node of depth d was rotated by context + d, where it lands.

    Args:
        buffers: L times [B, S, HKV, D], of any dtype; scales per token and head are buffers of D = 1.
        slots: where each node's entry was written, ``block * S + offset`` [T]; a negative one marks padding.
        cu_nodes: [R + 1].
        path: accepted nodes, root first [R, P].
        accepted: their number [R]; the slots behind them are left as they are.
    """
    for r in range(len(accepted)):
        first = int(cu_nodes[r])
        nodes = path[r, : int(accepted[r])].long()
        target, source = slots[first : first + len(nodes)].long(), slots[first + nodes].long()
        real = (target >= 0) & (source >= 0)
        target, source = target[real], source[real]
        for buffer in buffers:
            size = buffer.shape[1]
            buffer[target // size, target % size] = buffer[source // size, source % size].clone()
