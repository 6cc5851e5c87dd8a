"""Definition of the depthwise causal convolution over tree paths.

Shapes: R requests, T nodes of all requests together, D channels, W taps, N largest tree, P longest path.
"""

import torch
from torch.nn.functional import silu


def conv_tree(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: torch.Tensor,
    window_indices: torch.Tensor,
    parents: torch.Tensor | None,
    cu_nodes: torch.Tensor,
    *,
    activation: bool = True,
    out: torch.Tensor | None = None,
    inputs: torch.Tensor | None = None,
    record_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve each node with its last W - 1 ancestors, and with the committed window before them.

    ``out[t] = act(bias + sum_j weight[:, j] * z_j)``, where ``z`` is the last W of ``[window | x over root..t]``.

    Args:
        x: inputs before the convolution, requests one after another [T, D].
        weight: oldest tap first [D, W].
        bias: [D].
        window: the committed inputs, oldest first [slots, D, W - 1]; only read.
        window_indices: slot of each request [R]; a value <= 0 marks a padding row, whose output stays as it was.
        parents: parent index of each node [R, N], any topological order; a parent outside ``0..t-1`` makes node t a
            root. None: chains.
        cu_nodes: [R + 1]; nodes of request r are rows ``cu_nodes[r]`` to ``cu_nodes[r + 1]`` of ``x``.
        activation: SiLU, or none.
        inputs: keeps ``x`` until the commit [records, N, D]; needs ``record_indices``.
        record_indices: the request's place in ``inputs`` [R].

    Products are rounded to the dtype of ``x`` and summed in float32, as vLLM's kernel for a chain does; in float64,
    nothing is rounded.

    Returns: [T, D], dtype of ``x``.
    """
    out = torch.empty_like(x) if out is None else out
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    taps = weight.shape[1]
    for r, slot in enumerate(window_indices.tolist()):
        if slot <= 0:
            continue
        first, last = int(cu_nodes[r]), int(cu_nodes[r + 1])
        own = x[first:last]
        if inputs is not None:
            assert record_indices is not None
            inputs[int(record_indices[r]), : last - first] = own
        for t, path in enumerate(paths(parents, r, last - first)):
            z = torch.cat([window[slot].T.to(x.dtype), own[path]])[-taps:]
            products = z.T * weight.to(x.dtype)
            total = torch.zeros(x.shape[1], dtype=real) if bias is None else bias.to(real)
            for j in range(taps):
                total = total + products[:, j].to(real)
            out[first + t] = (silu(total) if activation else total).to(x.dtype)
    return out


def conv_commit(
    window: torch.Tensor,
    window_indices: torch.Tensor,
    inputs: torch.Tensor,
    record_indices: torch.Tensor,
    path: torch.Tensor | None,
    accepted: torch.Tensor,
) -> None:
    """Set each window, in place, to the last W - 1 of ``[window | inputs over the accepted path]``.

    Args:
        window: [slots, D, W - 1], oldest first.
        window_indices: [R]; a value <= 0 marks a padding row.
        inputs: as ``conv_tree`` left them [records, N, D].
        record_indices: [R].
        path: accepted nodes, root first [R, P]; None: a chain's first ones.
        accepted: their number [R]; 0 leaves the window as it is.
    """
    for r, slot in enumerate(window_indices.tolist()):
        if slot <= 0:
            continue
        count = int(accepted[r])
        nodes = list(range(count)) if path is None else path[r, :count].tolist()
        joined = torch.cat([window[slot].T, inputs[int(record_indices[r]), nodes].to(window.dtype)])
        window[slot] = joined[len(joined) - window.shape[2] :].T


def paths(parents: torch.Tensor | None, r: int, count: int) -> list[list[int]]:
    """Return the nodes from the root to each node of request ``r``."""
    found: list[list[int]] = []
    for t in range(count):
        parent = t - 1 if parents is None else int(parents[r, t])
        found.append([*(found[parent] if 0 <= parent < t else []), t])
    return found
