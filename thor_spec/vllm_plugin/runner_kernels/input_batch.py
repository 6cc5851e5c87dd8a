"""Replacements for ``vllm.v1.worker.gpu.input_batch``: from scheduled requests to the target's input and back.

Shapes: R requests in the batch, S slots of request state, T tokens, L logit rows. ``idx_mapping`` [R] gives the slot
of each request; ``query_start_loc`` and ``cu_num_logits`` [>= R + 1] bound its tokens and logit rows.
"""
# ruff: noqa: ARG001 - the parameters are the kernels', by which vLLM passes the arguments

import numpy as np
import torch

from thor_spec.vllm_plugin.runner_kernels.arrays import Replaces, flat, launchable


def _prepare_prefill_inputs_kernel(
    input_ids_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the scheduled prompt tokens of prefilling requests to ``input_ids`` [T], int32.

    ``next_prefill_tokens`` [lookahead, S] gets the prompt tokens after those, 0 past the prompt's end.
    """
    input_ids, lookahead = input_ids_ptr.numpy(), next_prefill_tokens_ptr.numpy()
    token_ids = all_token_ids_ptr.numpy()
    prefill_lens, num_computed = prefill_lens_ptr.numpy(), num_computed_tokens_ptr.numpy()
    starts = query_start_loc_ptr.tolist()
    for request, slot in enumerate(idx_mapping_ptr.tolist()):
        done, prefill_len = int(num_computed[slot]), int(prefill_lens[slot])
        if done >= prefill_len:
            continue
        start, end = starts[request], starts[request + 1]
        following = done + end - start
        input_ids[start:end] = token_ids[slot, done:following]
        known = min(num_lookahead, max(prefill_len - following, 0))
        lookahead[:known, slot] = token_ids[slot, following : following + known]
        lookahead[known:num_lookahead, slot] = 0


def _prepare_pos_seq_lens_kernel(
    pos_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Write each token's position to ``pos`` [T], int64, and each request's length to ``seq_lens`` [S], int32.

    Lengths past the batch become 0.
    """
    pos, seq_lens = pos_ptr.numpy(), seq_lens_ptr.numpy()
    slots = idx_mapping_ptr.numpy()
    num_reqs = len(slots)
    starts = query_start_loc_ptr.numpy()[: num_reqs + 1]
    query_lens = np.diff(starts)
    done = num_computed_tokens_ptr.numpy()[slots]
    seq_lens[:num_reqs] = done + query_lens
    seq_lens[num_reqs:max_num_reqs] = 0
    first, last = int(starts[0]), int(starts[-1])
    pos[first:last] = np.arange(first, last) + np.repeat(done - starts[:-1], query_lens)


def _combine_sampled_and_draft_tokens_kernel(
    input_ids_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Put the last sampled token and the drafts at the end of each decoding request in ``input_ids`` [T], int32.

    ``logits_indices`` [L], int64, gets the tokens whose logits are wanted: the last ones of each request.
    Prompt tokens in those places stay.
    """
    input_ids, logits_indices = input_ids_ptr.numpy(), logits_indices_ptr.numpy()
    last_sampled, drafts = flat(last_sampled_tokens_ptr), draft_tokens_ptr.numpy()
    seq_lens, prefill_lens = seq_lens_ptr.numpy(), prefill_len_ptr.numpy()
    starts, logit_starts = query_start_loc_ptr.tolist(), cu_num_logits_ptr.tolist()
    for request, slot in enumerate(idx_mapping_ptr.tolist()):
        query_end, first_logit = starts[request + 1], logit_starts[request]
        num_logits = logit_starts[request + 1] - first_logit
        logits_indices[first_logit : first_logit + num_logits] = np.arange(query_end - num_logits, query_end)
        seq_len, prefill_len = int(seq_lens[request]), int(prefill_lens[slot])
        if seq_len <= prefill_len:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and seq_len - num_logits >= prefill_len:
            input_ids[query_end - num_logits] = last_sampled[slot]
        num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS
        if num_drafts > 0:
            input_ids[query_end - num_drafts : query_end] = drafts[slot, :num_drafts]


def _get_num_sampled_and_rejected_kernel(
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
) -> None:
    """Write ``num_rejected`` [R], int32; zero both counts of requests whose prompt is not yet fully computed."""
    slots = idx_mapping_ptr.numpy()
    num_reqs = len(slots)
    num_sampled = num_sampled_ptr.numpy()
    computed = seq_lens_ptr.numpy()[:num_reqs] >= prefill_len_ptr.numpy()[slots]
    num_sampled[:num_reqs] *= computed
    num_logits = np.diff(cu_num_logits_ptr.numpy()[: num_reqs + 1])
    num_rejected_ptr.numpy()[:num_reqs] = (num_logits - num_sampled[:num_reqs]) * computed


@launchable
def _post_update_kernel(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
) -> None:
    """Append the sampled tokens [R, K + 1] to the request states and advance their counters.

    A negative slot in ``idx_mapping`` skips the request.
    """
    num_computed, total_len = num_computed_tokens_ptr.numpy(), total_len_ptr.numpy()
    last_sampled, token_ids = flat(last_sampled_tokens_ptr), all_token_ids_ptr.numpy()
    sampled = sampled_tokens_ptr.numpy()
    num_sampled, num_rejected = num_sampled_ptr.tolist(), num_rejected_ptr.tolist()
    counts = None if output_bin_counts_ptr is None else output_bin_counts_ptr.numpy()
    starts = None if query_start_loc_ptr is None else query_start_loc_ptr.tolist()
    for request, slot in enumerate(idx_mapping_ptr.tolist()):
        if slot < 0:
            continue
        count, length = num_sampled[request], int(total_len[slot])
        if count > 0:
            tokens = sampled[request, :count]
            token_ids[slot, length : length + count] = tokens
            last_sampled[slot] = tokens[-1]
            total_len[slot] = length + count
            if counts is not None:
                np.add.at(counts[slot], tokens, 1)
        query_len = 0 if starts is None else starts[request + 1] - starts[request]
        num_computed[slot] += query_len - num_rejected[request]


def _expand_idx_mapping_kernel(
    idx_mapping_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Write the slot, int64, and the place within its request, int32, of every logit row [L]."""
    slots = idx_mapping_ptr.numpy()
    bounds = cu_num_logits_ptr.numpy()[: len(slots) + 1]
    num_logits = np.diff(bounds)
    first, last = int(bounds[0]), int(bounds[-1])
    expanded_idx_mapping_ptr.numpy()[first:last] = np.repeat(slots, num_logits)
    expanded_local_pos_ptr.numpy()[first:last] = np.arange(first, last) - np.repeat(bounds[:-1], num_logits)


REPLACES: Replaces = {
    "vllm.v1.worker.gpu.input_batch": (
        _prepare_prefill_inputs_kernel,
        _prepare_pos_seq_lens_kernel,
        _combine_sampled_and_draft_tokens_kernel,
        _get_num_sampled_and_rejected_kernel,
        _post_update_kernel,
        _expand_idx_mapping_kernel,
    ),
}
