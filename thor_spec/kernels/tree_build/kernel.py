"""Best-first trees in Triton: one program per request keeps its frontier in registers."""

import torch
import triton
import triton.language as tl

from thor_spec.errors import ConfigError
from thor_spec.kernels.tree_build.reference import Layout, Trees
from thor_spec.kernels.tree_paths.reference import MAX_NODES


@triton.jit
def _pick(values, there):
    return tl.sum(tl.where(there, values, 0), axis=0)


@triton.jit(do_not_specialize=["straight"])
def _build(scores, tokens, chains, slots, out_tokens, out_parents, out_depths, out_scores, straight, K: tl.constexpr,
           W: tl.constexpr, NODES: tl.constexpr, SPINE: tl.constexpr, BY_SLOT: tl.constexpr,
           BF: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    scores += r * K * W
    tokens += r * K * W
    own = r
    if BY_SLOT:
        own = tl.load(slots + r).to(tl.int64)
    out_parents += own * (NODES + 1)
    out_depths += own * (NODES + 1)
    chain = tl.load(chains + own) != 0
    slot = tl.arange(0, BF)
    nothing = float("-inf")
    tl.store(out_parents, -1)
    tl.store(out_depths, 0)
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
        lies = tl.where(straight != 0, n <= K, real)
        place = tl.where(straight != 0, tl.minimum(n, K) - 1, d) * W + tl.where(straight != 0, 0, k)
        tl.store(out_tokens + r * NODES + n - 1, tl.load(tokens + place))
        tl.store(out_parents + n, tl.where(lies, tl.where(straight != 0, n - 1, p), -1))
        tl.store(out_depths + n, tl.where(lies, tl.where(straight != 0, n, d + 1), 0))
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


@triton.jit
def _lay(parents, depths, ranks, tokens, chains, slots, out_tokens, out_parents, out_depths, K: tl.constexpr,
         W: tl.constexpr, NODES: tl.constexpr, BY_SLOT: tl.constexpr, BF: tl.constexpr):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    own = r
    if BY_SLOT:
        own = tl.load(slots + r).to(tl.int64)
    chain = tl.load(chains + own) != 0
    n = tl.arange(0, BF)
    inside = n <= NODES
    there = n <= K
    depth = tl.load(depths + n, mask=inside, other=0)
    depth = tl.where(chain, tl.where(there, n, 0), depth)
    parent = tl.load(parents + n, mask=inside, other=0)
    parent = tl.where(chain, tl.where(there, n - 1, -1), parent)
    rank = tl.where(chain, 0, tl.load(ranks + n, mask=inside, other=0))
    place = tl.where(chain, tl.minimum(n, K), depth) - 1
    drafted = inside & (n > 0)
    token = tl.load(tokens + (r * K + place) * W + rank, mask=drafted, other=0)
    tl.store(out_tokens + r * NODES + n - 1, token, mask=drafted)
    tl.store(out_parents + own * (NODES + 1) + n, parent, mask=inside)
    tl.store(out_depths + own * (NODES + 1) + n, depth, mask=inside)


def build_trees(
    scores: torch.Tensor,
    tokens: torch.Tensor,
    chains: torch.Tensor,
    *,
    nodes: int,
    spine: int = 0,
    straight: bool = False,
    slots: torch.Tensor | None = None,
    out: Trees | None = None,
) -> Trees:
    """Return the trees; see ``reference.build_trees``. One launch, no synchronization."""
    requests, positions, width = scores.shape
    if nodes >= MAX_NODES or scores.dtype != torch.float32 or not (scores.is_contiguous() and tokens.is_contiguous()):
        raise ConfigError(
            f"build_trees: {nodes} nodes must be below {MAX_NODES}, and scores {scores.dtype} {tuple(scores.shape)} "
            "float32 and adjacent, like tokens."
        )
    found = out or Trees.allocate(requests, nodes, scores.device)
    _build[(requests,)](
        scores, tokens, chains, slots, found.tokens, found.parents, found.depths, found.scores, int(straight),
        K=positions, W=width, NODES=nodes, SPINE=min(spine, positions), BY_SLOT=slots is not None,
        BF=max(16, triton.next_power_of_2(nodes + 1)), num_warps=1,
    )  # fmt: skip
    return found


def lay_widths(
    layout: Layout,
    tokens: torch.Tensor,
    chains: torch.Tensor,
    *,
    slots: torch.Tensor | None = None,
    out: Trees | None = None,
) -> Trees:
    """Return trees of fixed widths; see ``reference.lay_widths``. One launch, no synchronization."""
    requests, positions, width = tokens.shape
    nodes = len(layout.parents) - 1
    if not tokens.is_contiguous():
        raise ConfigError("lay_widths: candidates must be adjacent.")
    found = out or Trees.allocate(requests, nodes, tokens.device)
    _lay[(requests,)](
        layout.parents, layout.depths, layout.ranks, tokens, chains, slots, found.tokens, found.parents, found.depths,
        K=positions, W=width, NODES=nodes, BY_SLOT=slots is not None, BF=max(16, triton.next_power_of_2(nodes + 1)),
        num_warps=1,
    )  # fmt: skip
    return found
