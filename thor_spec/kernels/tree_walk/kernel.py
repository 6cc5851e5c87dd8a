"""The walk in Triton: one program per request goes down its tree, one level per turn."""

import torch
import triton
import triton.language as tl

from thor_spec.errors import ConfigError
from thor_spec.kernels.tree_walk.reference import Trees, Walked


@triton.jit
def _tree_walk(parents, depths, drafts, choices, likely, starts, slots, path, accepted, counts, out_tokens, out_counts,
               order, W: tl.constexpr, BW: tl.constexpr, RELAXED: tl.constexpr):  # fmt: skip
    r = tl.program_id(0)
    slot = tl.load(slots + r).to(tl.int64)
    first = tl.load(starts + r).to(tl.int64)
    count = (tl.load(starts + r + 1).to(tl.int64) - first).to(tl.int32)
    n = tl.arange(0, BW)
    own = (n < count) & (n < W)
    parent = tl.load(parents + slot * W + n, mask=own, other=-1).to(tl.int32)
    parent = tl.where(parent < n, parent, -1)
    token = tl.load(drafts + first + n, mask=own, other=-1).to(tl.int64)
    choice = tl.load(choices + first + n, mask=own, other=-1).to(tl.int64)
    wanted = tl.load(choices + first + tl.maximum(parent, 0), mask=own, other=-1).to(tl.int64)
    real = (parent >= 0) & (token >= 0)
    worth = tl.where(real & (token == wanted), 2.0, 0.0)
    if RELAXED:
        p = tl.load(likely + r * W + n, mask=own, other=0.0)
        worth = tl.where(real & (worth == 0), p, worth)
    nodes = n
    tokens = tl.zeros([BW], tl.int64)
    at = tl.full([], 0, tl.int32)
    length = tl.full([], 1, tl.int32)
    going = tl.full([], 1, tl.int32)
    while going > 0:
        reach = tl.where(parent == at, worth, 0.0)
        best = tl.max(reach, axis=0)
        going = (best > 0).to(tl.int32)
        child = tl.min(tl.where((reach == best) & (reach > 0), n, BW), axis=0)
        draft = tl.sum(tl.where(n == child, token, 0), axis=0)
        last = tl.sum(tl.where(n == at, choice, 0), axis=0)
        tokens = tl.where(n == length - 1, tl.where(going > 0, draft, last), tokens)
        nodes = tl.where((n == length) & (going > 0), child, nodes)
        at = tl.where(going > 0, child, at)
        length += going
    tl.store(path + r * W + n, nodes, mask=n < W)
    tl.store(accepted + r, length)
    tl.store(out_tokens + r * W + n, tokens, mask=n < W)
    tl.store(out_counts + r, length)
    tl.store(order + first + n, first + tl.where(n < length, nodes, n), mask=own)
    depth = tl.max(tl.load(depths + slot * W + n, mask=own, other=0), axis=0)
    drafted = count > 1
    tl.atomic_add(counts + count - 1, 1, mask=drafted)
    tl.atomic_add(counts + W + depth, 1, mask=drafted)
    tl.atomic_add(counts + 2 * W + length - 1, 1, mask=drafted)


def tree_walk(
    trees: Trees,
    drafts: torch.Tensor,
    choices: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    likely: torch.Tensor | None = None,
) -> Walked:
    """Walk each tree from its root; see ``reference.tree_walk``. One launch, no synchronization."""
    width, rows = trees.parents.shape[1], len(slots)
    if any(not t.is_contiguous() for t in (trees.parents, trees.depths, trees.path, trees.counts, drafts, choices)):
        raise ConfigError("tree_walk: trees, drafts and choices must be adjacent.")
    found = Walked(
        tokens=torch.empty(rows, width, dtype=torch.int64, device=drafts.device),
        counts=torch.empty(rows, dtype=torch.int32, device=drafts.device),
        order=torch.empty(len(drafts), dtype=torch.int64, device=drafts.device),
    )
    _tree_walk[(rows,)](
        trees.parents, trees.depths, drafts, choices, likely, starts, slots, trees.path, trees.accepted, trees.counts,
        found.tokens, found.counts, found.order, W=width, BW=max(16, triton.next_power_of_2(width)),
        RELAXED=likely is not None, num_warps=1,
    )  # fmt: skip
    return found
