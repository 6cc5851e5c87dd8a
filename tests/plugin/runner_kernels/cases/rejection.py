"""Verification of drafts."""

from typing import Any

import numpy as np
import torch
import triton

from tests.plugin.runner_kernels.batch import INF, Batch, ints, poison, to
from tests.plugin.runner_kernels.cases.models import two_models
from tests.plugin.runner_kernels.launch import Launch, case


@case("_gather_draft_sampled_kernel")
def gather_draft_sampled(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    ends = np.repeat(b.starts[1:] - b.drafts - 1, b.drafts + 1)
    args = dict(
        draft_sampled_ptr=poison(b.logits),
        pos_ptr=poison(b.logits, dtype=torch.int64),
        input_ids_ptr=ints(rng, b.tokens),
        positions_ptr=to(b.positions()),
        logits_indices_ptr=to(ends + b.local, torch.int64),
        expanded_idx_mapping_ptr=to(b.expanded),
        expanded_local_pos_ptr=to(b.local),
        prefill_len_ptr=to(b.prefill_lens),
        num_logits=b.logits,
        BLOCK_SIZE=16,
    )
    return Launch((triton.cdiv(b.logits, 16),), args)


@case("_compute_local_logits_stats_kernel")
def logits_stats(rng: np.random.Generator) -> Launch:
    b, vocab, block = Batch(rng, steps=int(rng.integers(0, 8))), int(rng.choice([40, 90])), 32
    target, draft = two_models(rng, b, vocab)
    blocks = triton.cdiv(vocab, block)
    args: dict[str, Any] = {}
    for name in (
        "target_local_argmax",
        "target_local_max",
        "target_local_sumexp",
        "draft_local_max",
        "draft_local_sumexp",
    ):
        dtype = torch.int64 if "argmax" in name else torch.float32
        args |= {f"{name}_ptr": poison(b.logits, blocks, dtype=dtype), f"{name}_stride": blocks}
    args |= dict(
        target_logits_ptr=target,
        target_logits_stride=target.stride(0),
        draft_logits_ptr=draft,
        draft_logits_stride_0=0 if draft is None else draft.stride(0),
        draft_logits_stride_1=0 if draft is None else draft.stride(1),
        expanded_idx_mapping_ptr=to(b.expanded),
        expanded_local_pos_ptr=to(b.local),
        temp_ptr=to(b.temperatures),
        vocab_size=vocab,
        num_speculative_steps=b.steps,
        BLOCK_SIZE=block,
        HAS_DRAFT_LOGITS=draft is not None,
    )
    return Launch((b.logits, blocks), args, close=("target_local_sumexp_ptr", "draft_local_sumexp_ptr"))


def blocked(logits: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return argmax, maximum and sum of exponentials of each block, [rows, blocks]."""
    padded = torch.nn.functional.pad(logits.float(), (0, -logits.shape[-1] % block), value=-INF)
    parts = padded.unflatten(-1, (-1, block))
    largest, index = parts.max(-1)
    sumexp = (parts - largest.nan_to_num(neginf=0.0)[..., None]).exp().sum(-1)
    return index + torch.arange(parts.shape[-2]) * block, largest, sumexp


@case("_rejection_kernel")
def rejection(rng: np.random.Generator) -> Launch:
    b, vocab, block = Batch(rng, steps=int(rng.integers(1, 16))), 90, 32
    target, draft = two_models(rng, b, vocab)
    argmax, largest, sumexp = blocked(target[:, :vocab], block)
    rows = torch.zeros(b.logits, vocab)
    if draft is not None:
        for row, (slot, place) in enumerate(zip(b.expanded, b.local, strict=True)):
            if place < b.steps:
                rows[row] = draft[slot, place].float() / max(float(b.temperatures[slot]), 1e-3)
    _, draft_max, draft_sumexp = blocked(rows, block)
    drafts = rng.integers(-1, vocab, b.logits)
    likely = rng.random(b.logits) < 0.8
    drafts[1:] = np.where(likely[1:], target[:-1, :vocab].float().argmax(-1).numpy(), drafts[1:])
    drafts[rng.random(b.logits) < 0.1] = -1
    synthetic = rng.random() < 0.3
    args: dict[str, Any] = dict(
        sampled_ptr=poison(b.size, b.steps + 1, dtype=torch.int64),
        sampled_stride=b.steps + 1,
        rejected_steps_ptr=poison(b.size),
        target_rejected_logsumexp_ptr=poison(b.size, dtype=torch.float32),
        draft_rejected_logsumexp_ptr=poison(b.size, dtype=torch.float32),
        target_logits_ptr=target,
        target_logits_stride=target.stride(0),
    )
    statistics = dict(target_local_argmax=argmax, target_local_max=largest, target_local_sumexp=sumexp)
    args |= {f"{n}_{part}": x if part == "ptr" else 3 for n, x in statistics.items() for part in ("ptr", "stride")}
    args |= dict(
        draft_sampled_ptr=to(drafts, torch.int32),
        draft_logits_ptr=draft,
        draft_logits_stride_0=0 if draft is None else draft.stride(0),
        draft_logits_stride_1=0 if draft is None else draft.stride(1),
        draft_local_max_ptr=draft_max,
        draft_local_max_stride=3,
        draft_local_sumexp_ptr=draft_sumexp,
        draft_local_sumexp_stride=3,
        cu_num_logits_ptr=to(b.logit_starts),
        idx_mapping_ptr=to(b.slots),
        temp_ptr=to(b.temperatures),
        seed_ptr=to(b.seeds),
        pos_ptr=to(rng.integers(0, 9999, b.logits)),
        synthetic_conditional_rates_ptr=to(rng.uniform(0.5, 1.0, b.steps), torch.float32) if synthetic else None,
        cumulative_log_p_ptr=None,
        local_residual_mass_ptr=None,
        local_residual_mass_stride=0,
        vocab_num_blocks=3,
        PADDED_VOCAB_NUM_BLOCKS=4,
        HAS_DRAFT_LOGITS=draft is not None,
        SYNTHETIC_MODE=synthetic,
        USE_BLOCK_VERIFICATION=False,
    )
    return Launch((b.size,), args)
