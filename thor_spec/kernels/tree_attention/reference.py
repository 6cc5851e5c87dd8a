"""Definition of attention from draft nodes to a paged cache.

Shapes: R requests, T nodes of all requests together, HQ query heads, HKV heads of keys and values (HQ a multiple),
D head dim, B blocks of S slots, M blocks of the longest sequence, N largest tree (at most 64).
"""

import torch


def tree_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    masks: torch.Tensor,
    cu_nodes: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Let each node attend to the context, its ancestors and itself.

    ``out[t] = softmax(scale q[t] K^T) V`` over the context's slots and the slots of the nodes in ``masks[t]``. Slots
    run on without gaps behind the context, in the order of the nodes; *positions* do not: that of a node is the length
    of the context plus its depth. Rotation by position is the caller's.

    Args:
        q: [T, HQ, D].
        keys: with those of the nodes already written [B, S, HKV, D].
        values: [B, S, HKV, D].
        block_table: [R, M].
        seq_lens: slots in use, the nodes' included [R]; 0 marks a padding row, whose output stays as it was.
        masks: bit i is set if node i is t or an ancestor of t [R, N], int64, as ``tree_paths`` computes them.
        cu_nodes: [R + 1].
        window: a node sees positions above its own less this number; None: all.

    Returns: [T, HQ, D], dtype of ``q``.
    """
    out = torch.empty_like(q) if out is None else out
    size, heads = keys.shape[1:3]
    for r, length in enumerate(seq_lens.tolist()):
        first, last = int(cu_nodes[r]), int(cu_nodes[r + 1])
        if length <= 0 or last == first:
            continue
        context = length - (last - first)
        at = torch.arange(length)
        slots = block_table[r].long().cpu()[at // size] * size + at % size
        k = keys.reshape(-1, heads, keys.shape[3])[slots].double()
        v = values.reshape(-1, heads, values.shape[3])[slots].double()
        paths = [_nodes(int(mask)) for mask in masks[r, : last - first]]
        positions = torch.cat([at[:context], torch.tensor([context + len(path) - 1 for path in paths])])
        for t, path in enumerate(paths):
            seen = torch.zeros(length, dtype=torch.bool)
            seen[:context] = True
            seen[[context + node for node in path]] = True
            if window is not None:
                seen &= positions > positions[context + t] - window
            group = q.shape[1] // heads
            scores = torch.einsum("hgd,shd->hgs", q[first + t].double().view(heads, group, -1), k) * scale
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[first + t] = torch.einsum("hgs,shd->hgd", weights, v).reshape(q.shape[1:]).to(q.dtype)
    return out


def _nodes(mask: int) -> list[int]:
    return [node for node in range(64) if mask >> node & 1]
