"""Replacements for ``vllm.v1.worker.gpu.spec_decode``: which drafts the target accepts, and what it says instead.

Shapes: R requests in the batch, S slots of request state, L logit rows (each request's drafts, then one bonus row),
V tokens of vocabulary, B blocks of it, K drafts per request at most. Target logits are divided by the temperature
already; draft logits [S, K, V] are not. A draft of -1 is a placeholder, never accepted.
"""
# ruff: noqa: ARG001 - the parameters are the kernels', by which vLLM passes the arguments

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin.runner_kernels.arrays import Replaces, floats, in_blocks, launchable, leading, max_and_argmax
from thor_spec.vllm_plugin.runner_kernels.noise import philox_uniform


def _gather_draft_sampled_kernel(
    draft_sampled_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    num_logits: int,
    BLOCK_SIZE: int,
) -> None:
    """Write the input token, int32, and the position, int64, of every logit row [L]; -1 for drafts within a prompt."""
    token_indices = logits_indices_ptr.numpy()[:num_logits]
    positions = positions_ptr.numpy()[token_indices]
    local = expanded_local_pos_ptr.numpy()[:num_logits]
    prefill_lens = prefill_len_ptr.numpy()[expanded_idx_mapping_ptr.numpy()[:num_logits]]
    placeholder = (local > 0) & (positions - local < prefill_lens)
    draft_sampled_ptr.numpy()[:num_logits] = np.where(placeholder, -1, input_ids_ptr.numpy()[token_indices])
    pos_ptr.numpy()[:num_logits] = positions


def _compute_local_logits_stats_kernel(
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
) -> None:
    """Write, per draft row and vocabulary block [L, B], what verification reduces over.

    Greedy rows get the maximum, float32, and its token, int64; sampled rows the maximum and the sum of exponentials
    below it, of the target and the drafter. The rest of each buffer stays.
    """
    num_logits = target_local_max_ptr.shape[0]
    local = expanded_local_pos_ptr.numpy()[:num_logits]
    slots = expanded_idx_mapping_ptr.numpy()[:num_logits]
    temperatures = floats(temp_ptr)[slots]
    drafts = local < num_speculative_steps
    logits = floats(target_logits_ptr)[:, :vocab_size]
    if len(greedy := np.flatnonzero(drafts & (temperatures == 0.0))):
        largest, index = max_and_argmax(in_blocks(logits[greedy], BLOCK_SIZE))
        target_local_max_ptr.numpy()[greedy] = largest
        target_local_argmax_ptr.numpy()[greedy] = index + np.arange(index.shape[1]) * BLOCK_SIZE
    if len(sampled := np.flatnonzero(drafts & (temperatures != 0.0))):
        largest, sumexp = _max_and_sumexp(in_blocks(logits[sampled], BLOCK_SIZE))
        target_local_max_ptr.numpy()[sampled] = largest
        target_local_sumexp_ptr.numpy()[sampled] = sumexp
        if draft_logits_ptr is not None:
            proposed = draft_logits_ptr[
                torch.from_numpy(slots[sampled]).long(), torch.from_numpy(local[sampled]).long()
            ]
            scaled = floats(proposed)[:, :vocab_size] / temperatures[sampled][:, None]
            largest, sumexp = _max_and_sumexp(in_blocks(scaled, BLOCK_SIZE))
            draft_local_max_ptr.numpy()[sampled] = largest
            draft_local_sumexp_ptr.numpy()[sampled] = sumexp


def _max_and_sumexp(blocks: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    largest = np.fmax.reduce(blocks, axis=-1)
    possible = largest > -np.inf
    sumexp = np.exp(blocks - np.where(possible, largest, 0.0)[..., None]).sum(axis=-1)
    return largest, np.where(possible, sumexp, np.float32(0.0))


def _logsumexp(local_max: torch.Tensor, local_sumexp: torch.Tensor) -> NDArray[np.float32]:
    """Return each row's log-sum-exp from its blocks [L, B]; rows without statistics give anything."""
    maxes = local_max.numpy()
    largest = np.fmax.reduce(maxes, axis=-1)
    with np.errstate(all="ignore"):
        total: NDArray[np.float32] = (local_sumexp.numpy() * np.exp(maxes - largest[:, None])).sum(axis=-1)
        result: NDArray[np.float32] = largest + np.log(total)
    return result


@launchable
def _rejection_kernel(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    rejected_steps_ptr: torch.Tensor,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    synthetic_conditional_rates_ptr: torch.Tensor | None,
    cumulative_log_p_ptr: torch.Tensor | None,
    local_residual_mass_ptr: torch.Tensor | None,
    local_residual_mass_stride: int,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
) -> None:
    """Accept each request's drafts up to the first that fails, and write the tokens to ``sampled`` [R, K + 1], int64.

    A greedy request accepts a draft that is the target's argmax, and writes the argmax at the first that is not. Others
    accept with probability min(1, p / q), against a uniform number from seed and position. ``rejected_steps`` [R],
    int32, counts the accepted; the log-sum-exps [R], float32, are those of the last step looked at.
    """
    if USE_BLOCK_VERIFICATION:
        raise ConfigError(
            "Block verification is not replaced in torch. Use rejection_sample_method=standard in the speculative "
            "config, or thor_spec.runner_kernels=triton."
        )
    sampled, rejected_steps = sampled_ptr.numpy(), rejected_steps_ptr.numpy()
    target_lse, draft_lse = target_rejected_logsumexp_ptr.numpy(), draft_rejected_logsumexp_ptr.numpy()
    drafts, slots = draft_sampled_ptr.numpy(), idx_mapping_ptr.numpy()
    starts = cu_num_logits_ptr.numpy()[: len(slots) + 1]
    temperatures = floats(temp_ptr)[slots]
    rates = None if synthetic_conditional_rates_ptr is None else floats(synthetic_conditional_rates_ptr)
    _, best = max_and_argmax(target_local_max_ptr.numpy()[:, :vocab_num_blocks])
    argmax = target_local_argmax_ptr.numpy()[np.arange(len(best)), best]

    needs_chance = rates is not None or bool((temperatures != 0.0).any())
    if needs_chance:
        seeds = np.repeat(seed_ptr.numpy()[slots], np.diff(starts))
        uniform = philox_uniform(seeds, pos_ptr.numpy()[: len(seeds)])
        lse = _logsumexp(target_local_max_ptr, target_local_sumexp_ptr)
        proposed_lse = np.zeros_like(lse)
        if draft_logits_ptr is not None:
            proposed_lse = _logsumexp(draft_local_max_ptr, draft_local_sumexp_ptr)

    bounds = starts.tolist()
    for request, slot in enumerate(slots.tolist()):
        start, end = bounds[request], bounds[request + 1]
        tokens = drafts[start + 1 : end].astype(np.int64)
        valid = tokens >= 0
        temperature = temperatures[request]
        if temperature != 0.0:
            tokens = tokens[: leading(valid)]
        num_tokens = len(tokens)
        target_lse[request] = draft_lse[request] = 0.0
        rejected_steps[request] = 0
        if num_tokens == 0:
            continue
        rows = slice(start, start + num_tokens)
        if temperature == 0.0:
            matches = argmax[rows] == tokens if rates is None else uniform[rows] < rates[:num_tokens]
            accepted = matches & valid
            said = np.where(accepted, tokens, argmax[rows])
        else:
            said = tokens
            if rates is not None:
                accepted = uniform[rows] < rates[:num_tokens]
            else:
                choice = torch.from_numpy(tokens)[:, None]
                log_p = floats(target_logits_ptr[rows].gather(1, choice))[:, 0] - lse[rows]
                log_q: Any = np.float32(0.0)
                if draft_logits_ptr is not None:
                    proposed = floats(draft_logits_ptr[slot, :num_tokens].gather(1, choice))[:, 0]
                    log_q = proposed / temperature - proposed_lse[rows]
                accepted = log_p > np.log(uniform[rows]) + log_q
        count = leading(accepted)
        looked_at = min(count + 1, num_tokens)
        sampled[request, :looked_at] = said[:looked_at]
        rejected_steps[request] = count
        if temperature != 0.0:
            target_lse[request], draft_lse[request] = lse[start + looked_at - 1], proposed_lse[start + looked_at - 1]


REPLACES: Replaces = {
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler": (_gather_draft_sampled_kernel,),
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils": (
        _compute_local_logits_stats_kernel,
        _rejection_kernel,
    ),
}
