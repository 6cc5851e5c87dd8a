"""Replacements for ``vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils``: the token after the accepted drafts.

Shapes as in ``rejection``: R requests, S slots, L logit rows, V tokens of vocabulary, B blocks of it, K drafts.
"""
# ruff: noqa: ARG001 - the parameters are the kernels', by which vLLM passes the arguments

import numpy as np
import torch

from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin.runner_kernels.arrays import Replaces, floats, max_and_argmax
from thor_spec.vllm_plugin.runner_kernels.noise import sample_in_blocks


def _resample_kernel(
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    rejected_step_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    draft_sampled_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    cumulative_log_p_ptr: torch.Tensor | None,
    contexts_ptr: torch.Tensor | None,
    contexts_stride: int,
    watermarking_ptr: torch.Tensor | None,
    watermarking_skip_mask_ptr: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
    DEDUPLICATE_CONTEXTS: bool,
) -> None:
    """Sample, per vocabulary block [R, B], the token that follows the accepted drafts.

    From the target's distribution on the bonus row and after a placeholder, and otherwise from what the rejected
    draft leaves of it: max(p - q, 0), where q is the drafter's distribution or, without one, the draft itself. A
    rejected greedy draft needs none: the argmax stands in its place already.
    """
    if USE_BLOCK_VERIFICATION or WATERMARK:
        raise ConfigError(
            "Block verification and watermarking are not replaced in torch. Run without, or with "
            "thor_spec.runner_kernels=triton."
        )
    bounds, rejected = cu_num_logits_ptr.numpy(), rejected_step_ptr.numpy()
    num_reqs = len(rejected)
    rows = bounds[:num_reqs].astype(np.int64) + rejected
    bonus = rows == bounds[1 : num_reqs + 1] - 1
    slots = expanded_idx_mapping_ptr.numpy()[rows]
    temperatures = floats(temp_ptr)[slots]
    drawn = np.flatnonzero(bonus | (temperatures != 0.0))
    if len(drawn) == 0:
        return
    rows, slots, temperatures = rows[drawn], slots[drawn], temperatures[drawn]
    residual = floats(target_logits_ptr[torch.from_numpy(rows)])[:, :vocab_size]
    drafts = draft_sampled_ptr.numpy()
    for place, request in enumerate(drawn.tolist()):
        if bonus[request] or (draft := int(drafts[rows[place] + 1])) < 0:
            continue
        if draft_logits_ptr is None:
            residual[place, draft] = -np.inf
            continue
        step, slot = int(rejected[request]), int(slots[place])
        log_q = floats(draft_logits_ptr[slot, step])[:vocab_size] / temperatures[place]
        log_q = log_q - draft_rejected_logsumexp_ptr.numpy()[request]
        log_p = residual[place] - target_rejected_logsumexp_ptr.numpy()[request]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # where p or q is 0
            ratio = np.exp(log_q - log_p)
            residual[place] = np.where(ratio < 1.0, log_p + np.log1p(-ratio), -np.inf)
    values, tokens = sample_in_blocks(
        residual, temperatures, seed_ptr.numpy()[slots], pos_ptr.numpy()[rows], BLOCK_SIZE, fp64=USE_FP64
    )
    resampled_local_max_ptr.numpy()[drawn] = values
    resampled_local_argmax_ptr.numpy()[drawn] = tokens


def _insert_resampled_kernel(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    PADDED_RESAMPLE_NUM_BLOCKS: int,
) -> None:
    """Append the best block's token to ``sampled`` [R, K + 1], unless a greedy argmax is there, and count it."""
    num_sampled, bounds = num_sampled_ptr.numpy(), cu_num_logits_ptr.numpy()
    num_reqs = len(num_sampled)
    rows = bounds[:num_reqs] + num_sampled
    temperatures = floats(temp_ptr)[expanded_idx_mapping_ptr.numpy()[rows]]
    drawn = np.flatnonzero((temperatures != 0.0) | (rows == bounds[1 : num_reqs + 1] - 1))
    _, block = max_and_argmax(resampled_local_max_ptr.numpy()[drawn, :resample_num_blocks])
    sampled_ptr.numpy()[drawn, num_sampled[drawn]] = resampled_local_argmax_ptr.numpy()[drawn, block]
    num_sampled += 1


REPLACES: Replaces = {
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils": (
        _resample_kernel,
        _insert_resampled_kernel,
    ),
}
