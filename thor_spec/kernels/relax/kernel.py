"""Relaxation in Triton: one pass over the rows that may be relaxed, in one launch; see ``reference.py``."""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from thor_spec.errors import ConfigError
from thor_spec.kernels.relax.reference import CERTAIN

BLOCK = 4096
MAX_SPLITS = 8  # programs per row


@triton.jit
def _lift(logits, drafts, slots, temperature, eps, delta, saved, taken, part_max, part_sum, part_dot, arrived, rows,
          STRIDE: tl.constexpr, V: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
          CERTAIN: tl.constexpr):  # fmt: skip
    row, split = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    has_next = row + 1 < rows
    next_slot = tl.load(slots + row + 1, mask=has_next, other=-1)
    draft = tl.load(drafts + row + 1, mask=has_next, other=-1).to(tl.int64)
    highest = tl.load(eps + slot)
    factor = tl.load(delta + slot)
    judged = (next_slot == slot) & (draft >= 0) & (tl.load(temperature + slot) != 0) & (highest > 0) & (factor > 0)
    if not judged:
        if split == 0:
            tl.store(saved + row, float("nan"))
            tl.store(taken + row, float("nan"))
        return
    p_row = logits + row.to(tl.int64) * STRIDE
    share = tl.cdiv(tl.cdiv(V, SPLITS), BLOCK) * BLOCK
    top = float("-inf")
    mass = 0.0  # sum of exp(l - top)
    dot = 0.0  # sum of exp(l - top) (l - top)
    for start in range(split * share, tl.minimum((split + 1) * share, V), BLOCK):
        at = start + tl.arange(0, BLOCK)
        logit = tl.load(p_row + at, mask=at < V, other=float("-inf"))
        now = tl.maximum(top, tl.max(logit, axis=0))
        base = tl.where(now == float("-inf"), 0.0, now)
        weight = tl.exp(logit - base)
        keep = tl.where(top == float("-inf"), 0.0, tl.exp(top - base))
        down = tl.where(top == float("-inf"), 0.0, top - base)
        dot = keep * (dot + mass * down) + tl.sum(tl.where(weight > 0, weight * (logit - base), 0.0), axis=0)
        mass = keep * mass + tl.sum(weight, axis=0)
        top = now
    tl.store(part_max + row * SPLITS + split, top)
    tl.store(part_sum + row * SPLITS + split, mass)
    tl.store(part_dot + row * SPLITS + split, dot)
    # The last to arrive has all parts before it, and sums them in their order, whoever it is.
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(arrived + row, 0)
        i = row * SPLITS + tl.arange(0, SPLITS)
        tops = tl.load(part_max + i, cache_modifier=".cg")
        masses = tl.load(part_sum + i, cache_modifier=".cg")
        dots = tl.load(part_dot + i, cache_modifier=".cg")
        top = tl.max(tops, axis=0)
        is_there = tops > float("-inf")
        down = tl.where(is_there, tops - top, 0.0)
        keep = tl.where(is_there, tl.exp(down), 0.0)
        mass = tl.sum(keep * masses, axis=0)
        entropy = tl.log(mass) - tl.sum(keep * (dots + masses * down), axis=0) / mass
        own = tl.load(p_row + draft)
        p = tl.exp(own - top) / mass
        takes = (p > 0) & (p >= tl.minimum(highest, factor * tl.exp(-entropy)))
        tl.store(saved + row, tl.where(takes, own, float("nan")))
        tl.store(taken + row, tl.where(takes, p, float("nan")))
        tl.store(p_row + draft, CERTAIN, mask=takes)


@triton.jit
def _settle(logits, drafts, saved, cu_rows, slots, kinds, sampled, counts, STRIDE: tl.constexpr, K: tl.constexpr,
            BT: tl.constexpr):  # fmt: skip
    r = tl.program_id(0)
    first = tl.load(cu_rows + r).to(tl.int64)
    places = (tl.load(cu_rows + r + 1) - first).to(tl.int32) - 1
    t = tl.arange(0, BT)
    own = t < places
    draft = tl.load(drafts + first + t + 1, mask=own, other=-1).to(tl.int64)
    drafted = tl.min(tl.where(draft < 0, t, BT), axis=0)  # a place without a draft ends what is judged
    accepted = tl.minimum(tl.load(sampled + r).to(tl.int32) - 1, drafted)
    value = tl.load(saved + first + t, mask=own, other=float("nan"))
    lifted = own & (value == value)
    tl.store(logits + (first + t) * STRIDE + draft, value, mask=lifted)
    mine = counts + tl.load(kinds + tl.load(slots + r)).to(tl.int64) * 4 * K + t
    one = tl.full([BT], 1, tl.int64)
    tl.atomic_add(mine, one, mask=t < drafted)
    tl.atomic_add(mine + K, one, mask=t < accepted)
    tl.atomic_add(mine + 2 * K, one, mask=lifted & (t < accepted))
    tl.atomic_add(mine + 3 * K, one, mask=(t == accepted) & (accepted < drafted))


@dataclass(frozen=True, slots=True)
class Scratch:
    """What a launch needs beside its arguments; one set is kept for all steps."""

    parts: torch.Tensor
    """[3, L, MAX_SPLITS], float32."""
    arrived: torch.Tensor
    """[L], int32, zero between launches."""

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> Self:
        """Return buffers for launches of up to ``rows`` rows."""
        parts = torch.empty(3, rows, MAX_SPLITS, dtype=torch.float32, device=device)
        return cls(parts, torch.zeros(rows, dtype=torch.int32, device=device))


def lift(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    eps: torch.Tensor,
    delta: torch.Tensor,
    saved: torch.Tensor,
    *,
    taken: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """Make certain what is likely enough; see ``reference.lift``. Rows of exact requests cost nothing but a launch.

    Raises: ConfigError, if a dtype or layout does not fit.
    """
    rows, vocabulary = logits.shape
    for name, tensor in {"logits": logits, "eps": eps, "delta": delta, "saved": saved}.items():
        if tensor.dtype != torch.float32 or tensor.stride(-1) != 1:
            raise ConfigError(f"relax: {name} must be adjacent float32, not {tensor.dtype} of {tensor.stride()}.")
    if saved.numel() < rows:
        raise ConfigError(f"relax: {saved.numel()} saved values do not hold {rows} rows.")
    taken = torch.empty_like(saved) if taken is None else taken
    scratch = scratch or Scratch.allocate(rows, logits.device)
    if scratch.arrived.numel() < rows:
        raise ConfigError(f"relax: scratch for {scratch.arrived.numel()} rows does not hold {rows}.")
    splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(vocabulary, BLOCK)))
    _lift[(rows, splits)](
        logits, drafts, slots, temperature, eps, delta, saved, taken, *scratch.parts, scratch.arrived, rows,
        STRIDE=logits.stride(0), V=vocabulary, SPLITS=splits, BLOCK=BLOCK, CERTAIN=CERTAIN, num_warps=8,
    )  # fmt: skip
    return taken[:rows]


def settle(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    saved: torch.Tensor,
    cu_rows: torch.Tensor,
    slots: torch.Tensor,
    kinds: torch.Tensor,
    sampled: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Undo ``lift``, bit for bit, and count what became of the drafts; see ``reference.settle``."""
    places = counts.shape[2]
    if counts.dtype != torch.int64 or not counts.is_contiguous():
        raise ConfigError("relax: counts must be adjacent int64.")
    _settle[(slots.numel(),)](
        logits, drafts, saved, cu_rows, slots, kinds, sampled, counts, STRIDE=logits.stride(0), K=places,
        BT=triton.next_power_of_2(places + 1), num_warps=1,
    )  # fmt: skip
