"""Inputs of a step, and what it leaves behind."""

import numpy as np
import torch
import triton

from tests.plugin.runner_kernels.batch import SLOTS, WIDTH, Batch, ints, poison, to
from tests.plugin.runner_kernels.launch import Launch, case


@case("_prepare_prefill_inputs_kernel")
def prefill_inputs(rng: np.random.Generator) -> Launch:
    b, lookahead = Batch(rng), int(rng.integers(1, 4))
    upcoming, token_ids = poison(lookahead, SLOTS), ints(rng, SLOTS, WIDTH)
    args = dict(
        input_ids_ptr=poison(b.tokens + 3),
        next_prefill_tokens_ptr=upcoming,
        next_prefill_tokens_stride=upcoming.stride(0),
        num_lookahead=lookahead,
        idx_mapping_ptr=to(b.slots),
        query_start_loc_ptr=to(b.starts),
        all_token_ids_ptr=token_ids,
        all_token_ids_stride=WIDTH,
        prefill_lens_ptr=to(b.prefill_lens),
        num_computed_tokens_ptr=to(b.computed),
        BLOCK_SIZE=16,
        LOOKAHEAD_BLOCK=triton.next_power_of_2(lookahead),
    )
    return Launch((b.size,), args)


@case("_prepare_pos_seq_lens_kernel")
def pos_seq_lens(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    args = dict(
        pos_ptr=poison(b.tokens + 3, dtype=torch.int64),
        seq_lens_ptr=poison(SLOTS + 1),
        idx_mapping_ptr=to(b.slots),
        query_start_loc_ptr=to(np.append(b.starts, b.tokens)),
        num_computed_tokens_ptr=to(b.computed),
        max_num_reqs=SLOTS,
        BLOCK_SIZE=16,
    )
    return Launch((b.size + 1,), args)


@case("_combine_sampled_and_draft_tokens_kernel")
def combine(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    bonus = int(rng.random() < 0.8)
    logit_starts = np.concatenate(([0], np.cumsum(b.drafts + bonus))).astype(np.int32)
    args = dict(
        input_ids_ptr=ints(rng, b.tokens),
        idx_mapping_ptr=to(b.slots),
        last_sampled_tokens_ptr=ints(rng, SLOTS, 1, dtype=torch.int64),
        query_start_loc_ptr=to(b.starts),
        seq_lens_ptr=to(b.seq_lens, torch.int32),
        prefill_len_ptr=to(b.prefill_lens),
        draft_tokens_ptr=ints(rng, SLOTS, b.steps, dtype=torch.int64),
        draft_tokens_stride=b.steps,
        cu_num_logits_ptr=to(logit_starts),
        logits_indices_ptr=poison(int(logit_starts[-1]), dtype=torch.int64),
        BLOCK_SIZE=triton.next_power_of_2(b.steps + bonus),
        NUM_NEW_SAMPLED_TOKENS=bonus,
    )
    return Launch((b.size,), args)


@case("_get_num_sampled_and_rejected_kernel")
def num_sampled_and_rejected(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    args = dict(
        num_sampled_ptr=to(rng.integers(1, b.drafts + 2), torch.int32),
        num_rejected_ptr=poison(b.size),
        seq_lens_ptr=to(b.seq_lens, torch.int32),
        cu_num_logits_ptr=to(b.logit_starts),
        idx_mapping_ptr=to(b.slots),
        prefill_len_ptr=to(b.prefill_lens),
    )
    return Launch((b.size,), args)


@case("_post_update_kernel")
def post_update(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    counted, vocab = rng.random() < 0.6, 6  # so small that tokens repeat
    counts = ints(rng, SLOTS, vocab) if counted else None
    args = dict(
        idx_mapping_ptr=to(np.where(rng.random(b.size) < 0.2, -1, b.slots)),
        num_computed_tokens_ptr=to(b.computed),
        last_sampled_tokens_ptr=ints(rng, SLOTS, 1, dtype=torch.int64),
        output_bin_counts_ptr=counts,
        output_bin_counts_stride=vocab if counted else 0,
        sampled_tokens_ptr=ints(rng, b.size, b.steps + 1, high=vocab, dtype=torch.int64),
        sampled_tokens_stride=b.steps + 1,
        num_sampled_ptr=to(rng.integers(0, b.drafts + 2), torch.int32),
        num_rejected_ptr=to(rng.integers(0, b.drafts + 1), torch.int32),
        query_start_loc_ptr=to(b.starts) if rng.random() < 0.8 else None,
        all_token_ids_ptr=ints(rng, SLOTS, WIDTH),
        all_token_ids_stride=WIDTH,
        total_len_ptr=to(b.prefill_lens),
    )
    return Launch((b.size,), args)


@case("_expand_idx_mapping_kernel")
def expand(rng: np.random.Generator) -> Launch:
    b = Batch(rng, steps=int(rng.integers(0, 16)))
    args = dict(
        idx_mapping_ptr=to(b.slots),
        expanded_idx_mapping_ptr=poison(b.logits + 2, dtype=torch.int64),
        expanded_local_pos_ptr=poison(b.logits + 2),
        cu_num_logits_ptr=to(b.logit_starts),
        BLOCK_SIZE=triton.next_power_of_2(b.steps + 1),
    )
    return Launch((b.size,), args)
