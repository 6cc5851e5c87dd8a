"""The convolution in Triton: a program takes one node and a block of channels; see ``reference.py``."""

import torch
import triton
import triton.language as tl

from thor_spec import env
from thor_spec.errors import ConfigError
from thor_spec.kernels.rounding.kernel import rounded

BLOCK = 256
MAX_TAPS = 8  # a node's ancestors are found one by one


@triton.jit
def _conv_tree(x, weight, bias, window, window_indices, parents, cu_nodes, out, inputs, record_indices,
               X_STRIDE: tl.constexpr, W_STRIDE: tl.constexpr, WINDOW_STRIDE: tl.constexpr,
               WINDOW_D: tl.constexpr, WINDOW_T: tl.constexpr, PARENTS_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
               RECORD_STRIDE: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr, TREE: tl.constexpr,
               HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, KEEP: tl.constexpr, INTERPRETED: tl.constexpr,
               BD: tl.constexpr):  # fmt: skip
    t, i_r = tl.program_id(1), tl.program_id(2)
    slot = tl.load(window_indices + i_r).to(tl.int64)
    first = tl.load(cu_nodes + i_r).to(tl.int64)
    if (slot <= 0) | (t >= tl.load(cu_nodes + i_r + 1) - first):
        return
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    inside = d < D
    own = tl.load(x + (first + t) * X_STRIDE + d, mask=inside, other=0)
    if KEEP:
        tl.store(inputs + tl.load(record_indices + i_r).to(tl.int64) * RECORD_STRIDE + t * D + d, own, mask=inside)
    # Lags 1..TAPS-1: an ancestor while there is one, then the window, newest first. Kept as scalars and recomputed per
    # tap, since the sum must run from the oldest tap on.
    acc = tl.zeros([BD], dtype=tl.float32)
    if HAS_BIAS:
        acc = tl.load(bias + d, mask=inside, other=0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        node = t
        before = 0  # how far behind the root, once there
        for _ in tl.static_range(TAPS - 1 - tap):
            if TREE:
                parent = tl.load(parents + i_r * PARENTS_STRIDE + tl.maximum(node, 0)).to(tl.int32)
                up = tl.where((parent >= 0) & (parent < node), parent, -1)
            else:
                up = node - 1
            before = tl.where(node < 0, before + 1, tl.where(up < 0, 1, 0))
            node = tl.where(node < 0, -1, tl.maximum(up, -1))
        from_x = tl.load(x + (first + tl.maximum(node, 0)) * X_STRIDE + d, mask=inside & (node >= 0), other=0)
        p_window = window + slot * WINDOW_STRIDE + d * WINDOW_D + (TAPS - 1 - tl.maximum(before, 1)) * WINDOW_T
        from_window = tl.load(p_window, mask=inside & (node < 0), other=0).to(x.dtype.element_ty)
        z = tl.where(node >= 0, from_x, from_window)
        w = tl.load(weight + d * W_STRIDE + tap, mask=inside, other=0).to(x.dtype.element_ty)
        if INTERPRETED:  # it cannot multiply bfloat16
            acc += rounded(z.to(tl.float32) * w.to(tl.float32), x.dtype.element_ty, INTERPRETED).to(tl.float32)
        else:
            acc += z * w  # rounded to the inputs' dtype, as in vLLM's kernel
    if ACTIVATION:
        acc = acc / (1 + tl.exp(-acc))
    tl.store(out + (first + t) * OUT_STRIDE + d, rounded(acc, out.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def _conv_commit(window, window_indices, inputs, record_indices, path, accepted,
                 WINDOW_STRIDE: tl.constexpr, WINDOW_D: tl.constexpr, WINDOW_T: tl.constexpr,
                 RECORD_STRIDE: tl.constexpr, PATH_STRIDE: tl.constexpr, D: tl.constexpr, KEPT: tl.constexpr,
                 BY_PATH: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    i_r = tl.program_id(1)
    slot = tl.load(window_indices + i_r).to(tl.int64)
    count = tl.load(accepted + i_r).to(tl.int32)
    if (slot <= 0) | (count <= 0):
        return
    rec = tl.load(record_indices + i_r).to(tl.int64)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    j = tl.arange(0, BK)
    at = count + j - KEPT  # place on the path; negative: this many before it, in the window
    node = at
    if BY_PATH:
        node = tl.load(path + i_r * PATH_STRIDE + at, mask=(j < KEPT) & (at >= 0), other=0).to(tl.int32)
    inside = (d < D)[None, :] & (j < KEPT)[:, None]
    p_window = window + slot * WINDOW_STRIDE + d[None, :] * WINDOW_D
    old = tl.load(p_window + (KEPT + at)[:, None] * WINDOW_T, mask=inside & (at < 0)[:, None], other=0)
    p_inputs = inputs + rec * RECORD_STRIDE + node.to(tl.int64)[:, None] * D + d[None, :]
    new = tl.load(p_inputs, mask=inside & (at >= 0)[:, None], other=0).to(window.dtype.element_ty)
    # All is read before anything is written: the rows of one channel may sit in different threads.
    tl.debug_barrier()
    tl.store(p_window + j[:, None] * WINDOW_T, tl.where((at < 0)[:, None], old, new), mask=inside)


def conv_tree(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: torch.Tensor,
    window_indices: torch.Tensor,
    parents: torch.Tensor | None,
    cu_nodes: torch.Tensor,
    *,
    width: int,
    activation: bool = True,
    out: torch.Tensor | None = None,
    inputs: torch.Tensor | None = None,
    record_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve each node along its path; see ``reference.conv_tree``.

    Args:
        width: most nodes that a request of this launch may have; a graph is captured with the largest.

    Raises: ConfigError, if a layout does not fit.
    """
    dim, taps = weight.shape
    out = torch.empty_like(x) if out is None else out
    for name, tensor in {"x": x, "out": out, "weight": weight}.items():
        if tensor.stride(1) != 1:
            raise ConfigError(f"conv_tree: the last axis of {name} must be adjacent, not of stride {tensor.stride(1)}.")
    if not 2 <= taps <= MAX_TAPS or window.shape[1:] != (dim, taps - 1):
        raise ConfigError(
            f"conv_tree: a window of {tuple(window.shape)} does not fit weights of {tuple(weight.shape)}; "
            f"2 to {MAX_TAPS} taps are supported."
        )
    if inputs is not None and (record_indices is None or not inputs.is_contiguous() or inputs.shape[2] != dim):
        raise ConfigError("conv_tree: inputs must be adjacent [records, N, D], with record_indices.")
    _conv_tree[(triton.cdiv(dim, BLOCK), width, window_indices.numel())](
        x, weight, bias, window, window_indices, parents, cu_nodes, out, inputs, record_indices,
        X_STRIDE=x.stride(0), W_STRIDE=weight.stride(0), WINDOW_STRIDE=window.stride(0), WINDOW_D=window.stride(1),
        WINDOW_T=window.stride(2), PARENTS_STRIDE=0 if parents is None else parents.stride(0),
        OUT_STRIDE=out.stride(0), RECORD_STRIDE=0 if inputs is None else inputs.stride(0), D=dim, TAPS=taps,
        TREE=parents is not None, HAS_BIAS=bias is not None, ACTIVATION=activation, KEEP=inputs is not None,
        INTERPRETED=env.triton_interprets(), BD=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def conv_commit(
    window: torch.Tensor,
    window_indices: torch.Tensor,
    inputs: torch.Tensor,
    record_indices: torch.Tensor,
    path: torch.Tensor | None,
    accepted: torch.Tensor,
) -> None:
    """Shift each window over its accepted path, in place; see ``reference.conv_commit``. One launch per layer."""
    if not inputs.is_contiguous() or (path is not None and path.stride(1) != 1):
        raise ConfigError("conv_commit: inputs and the entries of a path must be adjacent.")
    dim, kept = window.shape[1:]
    _conv_commit[(triton.cdiv(dim, BLOCK), window_indices.numel())](
        window, window_indices, inputs, record_indices, path, accepted,
        WINDOW_STRIDE=window.stride(0), WINDOW_D=window.stride(1), WINDOW_T=window.stride(2),
        RECORD_STRIDE=inputs.stride(0), PATH_STRIDE=0 if path is None else path.stride(0), D=dim, KEPT=kept,
        BY_PATH=path is not None, BK=triton.next_power_of_2(kept), BD=BLOCK, num_warps=4,
    )  # fmt: skip
