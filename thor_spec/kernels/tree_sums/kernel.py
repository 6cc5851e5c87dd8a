"""The sums in Triton: one program for the batch."""

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def _tree_sums(nodes, scores, sampled, accepted, out, rows, N: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
               BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    n, k = tl.arange(0, BN), tl.arange(0, BK)
    trees = tl.zeros([BN], tl.float32)
    chains = tl.zeros([BK], tl.float32)
    drafts = tl.full([], 0.0, tl.float32)
    count = tl.full([], 0.0, tl.float32)
    for r in range(rows):
        emits = tl.load(sampled + r) > 0
        trees += tl.exp(tl.load(nodes + r * N + n, mask=(n < N) & emits, other=float("-inf")))
        first = tl.load(scores + (r * K + k) * W, mask=k < K, other=0.0)
        chains += tl.where(emits, tl.exp(tl.cumsum(first, axis=0)), 0.0)
        last = tl.load(accepted + r).to(tl.float32) - 1
        drafts += tl.where(emits, tl.maximum(last, 0.0), 0.0)
        count += tl.where(emits, 1.0, 0.0)
    tl.store(out + n, trees, mask=n < N)
    tl.store(out + N + k, chains, mask=k < K)
    tl.store(out + N + K, drafts)
    tl.store(out + N + K + 1, count)


def tree_sums(
    nodes: torch.Tensor,
    scores: torch.Tensor,
    sampled: torch.Tensor,
    accepted: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sums; see ``reference.tree_sums``. One launch, no synchronization."""
    rows, count = nodes.shape
    _, positions, width = scores.shape
    if out is None:
        out = torch.empty(count + positions + 2, dtype=torch.float32, device=nodes.device)
    _tree_sums[(1,)](
        nodes, scores, sampled, accepted, out, rows, N=count, K=positions, W=width,
        BN=max(16, triton.next_power_of_2(count)), BK=max(16, triton.next_power_of_2(positions)), num_warps=1,
    )  # fmt: skip
    return out
