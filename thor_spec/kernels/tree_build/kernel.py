"""Best-first trees in Triton: one program per request keeps its frontier in registers."""

import torch
import triton
import triton.language as tl

from thor_spec.errors import ConfigError
from thor_spec.kernels.tree_build.reference import Trees
from thor_spec.kernels.tree_paths.reference import MAX_NODES


@triton.jit
def _pick(values, there):
    return tl.sum(tl.where(there, values, 0), axis=0)


@triton.jit
def _build(scores, tokens, chains, out_tokens, out_parents, out_depths, out_scores, K: tl.constexpr, W: tl.constexpr,
           NODES: tl.constexpr, SPINE: tl.constexpr, BF: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    scores += r * K * W
    tokens += r * K * W
    chain = tl.load(chains + r) != 0
    slot = tl.arange(0, BF)
    nothing = float("-inf")
    tl.store(out_parents + r * (NODES + 1), -1)
    tl.store(out_depths + r * (NODES + 1), 0)
    cost = tl.where(slot == 0, tl.load(scores), nothing)
    base = tl.zeros([BF], tl.float32)
    depth = tl.zeros([BF], tl.int32)
    rank = tl.zeros([BF], tl.int32)
    parent = tl.zeros([BF], tl.int32)
    for n in range(1, NODES + 1):
        best = tl.argmax(cost, axis=0).to(tl.int32)
        best = tl.where(chain | (n <= SPINE), n - 1, best)
        there = slot == best
        at = tl.max(tl.where(there, cost, nothing), axis=0)
        real = at > nothing
        own_base = _pick(base, there)
        d = _pick(depth, there)
        k = _pick(rank, there)
        p = _pick(parent, there)
        tl.store(out_tokens + r * NODES + n - 1, tl.load(tokens + d * W + k))
        tl.store(out_parents + r * (NODES + 1) + n, tl.where(real, p, -1))
        tl.store(out_depths + r * (NODES + 1) + n, tl.where(real, d + 1, 0))
        tl.store(out_scores + r * NODES + n - 1, at)
        next_rank = tl.minimum(k + 1, W - 1)
        has_sibling = real & (k + 1 < W) & (chain == 0)
        sibling = tl.where(has_sibling, own_base + tl.load(scores + d * W + next_rank), nothing)
        next_depth = tl.minimum(d + 1, K - 1)
        child = tl.where(real & (d + 1 < K), at + tl.load(scores + next_depth * W), nothing)
        fresh = slot == n
        cost = tl.where(there, sibling, tl.where(fresh, child, cost))
        rank = tl.where(there, next_rank, rank)
        base = tl.where(fresh, at, base)
        depth = tl.where(fresh, next_depth, depth)
        parent = tl.where(fresh, n, parent)


def build_trees(
    scores: torch.Tensor, tokens: torch.Tensor, chains: torch.Tensor, *, nodes: int, spine: int = 0
) -> Trees:
    """Return the trees; see ``reference.build_trees``. One launch, no synchronization."""
    requests, positions, width = scores.shape
    if nodes >= MAX_NODES or scores.dtype != torch.float32 or not (scores.is_contiguous() and tokens.is_contiguous()):
        raise ConfigError(
            f"build_trees: {nodes} nodes must be below {MAX_NODES}, and scores {scores.dtype} {tuple(scores.shape)} "
            "float32 and adjacent, like tokens."
        )
    found = Trees.allocate(requests, nodes, scores.device)
    _build[(requests,)](
        scores, tokens, chains, found.tokens, found.parents, found.depths, found.scores, K=positions, W=width,
        NODES=nodes, SPINE=min(spine, positions), BF=max(16, triton.next_power_of_2(nodes + 1)), num_warps=1,
    )  # fmt: skip
    return found
