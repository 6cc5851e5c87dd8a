"""Replacements for the logits processors in ``vllm.v1.worker.gpu.sample`` and the grammar mask.

Shapes: N logit rows, S slots of request state, V tokens of vocabulary. Logits [N, V] change in place.
"""
# ruff: noqa: ARG001 - the parameters are the kernels', by which vLLM passes the arguments

import itertools

import numpy as np
import torch

from thor_spec.vllm_plugin.runner_kernels.arrays import Replaces, bits


def _penalties_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    repetition_penalty_ptr: torch.Tensor,
    frequency_penalty_ptr: torch.Tensor,
    presence_penalty_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Apply repetition, frequency and presence penalties, float32 [S].

    ``output_bin_counts`` [S, V], int32, counts the generated tokens; a row that verifies a draft counts the drafts
    before it as well. ``prompt_bin_mask`` [S, V / 32] has a bit for every token in the prompt.
    """
    logits = logits_ptr.numpy()[:, :vocab_size]
    slots = expanded_idx_mapping_ptr.numpy()[: len(logits)]
    repetition, frequency, presence = (
        penalty.numpy()[slots][:, None]
        for penalty in (repetition_penalty_ptr, frequency_penalty_ptr, presence_penalty_ptr)
    )
    counts = output_bin_counts_ptr.numpy()[slots, :vocab_size]
    token_ids = token_ids_ptr.tolist()
    for row, place in enumerate(expanded_local_pos_ptr.tolist()):
        if place > 0:  # the row before belongs to the same request
            counts[row] = counts[row - 1]
            if 0 <= token_ids[row] < vocab_size:
                counts[row, token_ids[row]] += 1
    generated = counts > 0
    seen = generated | bits(prompt_bin_mask_ptr.numpy()[slots], vocab_size)
    scale = np.where(seen, repetition, np.float32(1.0))
    logits *= np.where(logits > 0, np.float32(1.0) / scale, scale)
    logits -= frequency * counts.astype(np.float32)
    logits -= presence * generated.astype(np.float32)


def _bias_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: torch.Tensor,
    bias_token_ids_ptr: torch.Tensor,
    bias_token_ids_stride: int,
    bias_ptr: torch.Tensor,
    bias_stride: int,
    pos_ptr: torch.Tensor,
    min_lens_ptr: torch.Tensor,
    num_stop_token_ids_ptr: torch.Tensor,
    restore_when_all_masked_ptr: torch.Tensor,
    stop_token_ids_ptr: torch.Tensor,
    stop_token_ids_stride: int,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Keep only the allowed tokens, add the biases, and forbid stop tokens below the minimum length.

    Each list of token ids is int32 [S, capacity] with a count [S]. Where forbidding them leaves nothing and the
    request asks for it, the stop tokens that were possible come back.
    """
    logits = logits_ptr.numpy()
    positions = pos_ptr.tolist()
    allowed_counts, bias_counts = num_allowed_token_ids_ptr.numpy(), num_logit_bias_ptr.numpy()
    stop_counts, min_lens = num_stop_token_ids_ptr.numpy(), min_lens_ptr.numpy()
    for row, slot in enumerate(expanded_idx_mapping_ptr.tolist()):
        line = logits[row, :vocab_size]
        if count := allowed_counts[slot]:
            allowed = allowed_token_ids_ptr.numpy()[slot, :count]
            kept = line[allowed]
            line[:] = -np.inf
            line[allowed] = kept
        if count := bias_counts[slot]:
            line[bias_token_ids_ptr.numpy()[slot, :count]] += bias_ptr.numpy()[slot, :count]
        if (count := stop_counts[slot]) and positions[row] + 1 < min_lens[slot]:
            stop = stop_token_ids_ptr.numpy()[slot, :count]
            before = line[stop]
            line[stop] = -np.inf
            restore = CHECK_ALL_MASKED_ROWS and bool(restore_when_all_masked_ptr[slot])
            if restore and np.fmax.reduce(line) == -np.inf:
                possible = np.isfinite(before)
                line[stop[possible]] = before[possible]


def _bad_words_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    bad_word_token_ids_ptr: torch.Tensor,
    bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: torch.Tensor,
    bad_word_offsets_stride: int,
    num_bad_words_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
) -> None:
    """Forbid the last token of every bad word whose other tokens were generated just before.

    The generated tokens [S, length] are followed by the drafts that the row's request verifies before it.
    """
    logits, token_ids, input_ids = logits_ptr.numpy(), all_token_ids_ptr.numpy(), input_ids_ptr.tolist()
    places, counts = expanded_local_pos_ptr.tolist(), num_bad_words_ptr.tolist()
    for row, slot in enumerate(expanded_idx_mapping_ptr.tolist()):
        if counts[slot] == 0:
            continue
        place = places[row]
        offsets = bad_word_offsets_ptr[slot, : counts[slot] + 1].tolist()
        words = bad_word_token_ids_ptr[slot, : offsets[-1]].tolist()
        longest = max(end - start for start, end in itertools.pairwise(offsets)) - 1
        total_len = int(total_len_ptr[slot])
        generated_from = max(int(prompt_len_ptr[slot]), total_len - longest)
        tail = token_ids[slot, generated_from:total_len].tolist() + input_ids[row - place + 1 : row + 1]
        for start, end in itertools.pairwise(offsets):
            prefix = words[start : end - 1]
            if len(prefix) <= len(tail) and tail[len(tail) - len(prefix) :] == prefix:
                logits[row, words[end - 1]] = -np.inf


def _apply_grammar_bitmask_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    logits_indices_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    bitmask_ptr: torch.Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """Forbid the tokens whose bit is 0 in each mask, int32 [masks, V / 32].

    ``logits_indices`` [masks] is request * MASK_STRIDE + place; places that the request has no logits for are skipped.
    """
    bounds = cu_num_logits_ptr.tolist()
    forbidden = torch.from_numpy(~bits(bitmask_ptr.numpy(), vocab_size))
    for mask, index in enumerate(logits_indices_ptr.tolist()):
        request, place = divmod(index, MASK_STRIDE)
        row = bounds[request] + place
        if row < bounds[request + 1]:
            logits_ptr[row, :vocab_size].masked_fill_(forbidden[mask], -torch.inf)


REPLACES: Replaces = {
    "vllm.v1.worker.gpu.sample.penalties": (_penalties_kernel,),
    "vllm.v1.worker.gpu.sample.logit_bias": (_bias_kernel,),
    "vllm.v1.worker.gpu.sample.bad_words": (_bad_words_kernel,),
    "vllm.v1.worker.gpu.structured_outputs": (_apply_grammar_bitmask_kernel,),
}
