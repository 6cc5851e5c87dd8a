"""The token in place of a rejected draft."""

import numpy as np
import torch
import triton

from tests.plugin.runner_kernels.batch import Batch, ints, poison, to
from tests.plugin.runner_kernels.cases.models import two_models
from tests.plugin.runner_kernels.launch import Launch, case


@case("_resample_kernel")
def resample(rng: np.random.Generator) -> Launch:
    b, vocab, block = Batch(rng), int(rng.choice([50, 90])), 64
    target, draft = two_models(rng, b, vocab)
    rejected = rng.integers(0, b.drafts + 1)
    at = torch.from_numpy(b.logit_starts[:-1] + rejected).long()
    target_lse, draft_lse = target[at, :vocab].float().logsumexp(-1), torch.zeros(b.size)
    if draft is not None:
        slots = torch.from_numpy(b.slots)
        scale = torch.from_numpy(np.maximum(b.temperatures[b.slots], np.float32(1e-3)))
        proposed = draft[slots, torch.from_numpy(rejected).clamp(max=b.steps - 1)].float() / scale[:, None]
        draft_lse = proposed.logsumexp(-1)
    fp64, blocks = bool(rng.random() < 0.3), triton.cdiv(vocab, block)
    args = dict(
        resampled_local_argmax_ptr=poison(b.size, blocks, dtype=torch.int64),
        resampled_local_argmax_stride=blocks,
        resampled_local_max_ptr=poison(b.size, blocks, dtype=torch.float64 if fp64 else torch.float32),
        resampled_local_max_stride=blocks,
        target_logits_ptr=target,
        target_logits_stride=target.stride(0),
        target_rejected_logsumexp_ptr=target_lse,
        draft_logits_ptr=draft,
        draft_logits_stride_0=0 if draft is None else draft.stride(0),
        draft_logits_stride_1=0 if draft is None else draft.stride(1),
        draft_rejected_logsumexp_ptr=draft_lse,
        rejected_step_ptr=to(rejected, torch.int32),
        cu_num_logits_ptr=to(b.logit_starts),
        expanded_idx_mapping_ptr=to(b.expanded),
        draft_sampled_ptr=to(rng.integers(-1, vocab, b.logits), torch.int32),
        temp_ptr=to(b.temperatures),
        seed_ptr=to(b.seeds),
        pos_ptr=to(rng.integers(0, 9999, b.logits)),
        cumulative_log_p_ptr=None,
        contexts_ptr=None,
        contexts_stride=0,
        watermarking_ptr=None,
        watermarking_skip_mask_ptr=None,
        watermark_key_0=0,
        watermark_key_1=0,
        vocab_size=vocab,
        BLOCK_SIZE=block,
        HAS_DRAFT_LOGITS=draft is not None,
        USE_FP64=fp64,
        USE_BLOCK_VERIFICATION=False,
        CONTEXT_WIDTH=1,
        WATERMARK=False,
        DEDUPLICATE_CONTEXTS=False,
    )
    # Only then is there a logarithm of a sum, for which the kernel's library function cannot be interpreted.
    close = () if draft is None else ("resampled_local_max_ptr",)
    return Launch((b.size, blocks), args, close=close)


@case("_insert_resampled_kernel")
def insert_resampled(rng: np.random.Generator) -> Launch:
    b, blocks = Batch(rng), 3
    best = rng.normal(size=(b.size, blocks)).astype(np.float32)
    best[rng.random(best.shape) < 0.2] = float("nan")
    args = dict(
        sampled_ptr=poison(b.size, b.steps + 1, dtype=torch.int64),
        sampled_stride=b.steps + 1,
        num_sampled_ptr=to(rng.integers(0, b.drafts + 1), torch.int32),
        resampled_local_argmax_ptr=ints(rng, b.size, blocks, dtype=torch.int64),
        resampled_local_argmax_stride=blocks,
        resampled_local_max_ptr=to(best),
        resampled_local_max_stride=blocks,
        resample_num_blocks=blocks,
        cu_num_logits_ptr=to(b.logit_starts),
        expanded_idx_mapping_ptr=to(b.expanded),
        temp_ptr=to(b.temperatures),
        PADDED_RESAMPLE_NUM_BLOCKS=4,
    )
    return Launch((b.size,), args)
