"""What changes logits before sampling: penalties, biases, bad words, grammars."""

import numpy as np
import torch

from tests.plugin.runner_kernels.batch import SLOTS, WIDTH, Batch, ints, some_logits, to
from tests.plugin.runner_kernels.launch import Launch, case


@case("_penalties_kernel")
def penalties(rng: np.random.Generator) -> Launch:
    b, vocab = Batch(rng), 90
    logits = some_logits(rng, b.logits, vocab)

    def penalty(neutral: float) -> torch.Tensor:
        return to(np.where(rng.random(SLOTS) < 0.4, neutral, rng.uniform(0.2, 1.9, SLOTS)), torch.float32)

    counts = to(rng.integers(0, 4, (SLOTS, vocab)) * (rng.random((SLOTS, vocab)) < 0.3), torch.int32)
    args = dict(
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        expanded_idx_mapping_ptr=to(b.expanded),
        token_ids_ptr=to(rng.integers(-1, vocab, b.logits), torch.int32),
        expanded_local_pos_ptr=to(b.local),
        repetition_penalty_ptr=penalty(1.0),
        frequency_penalty_ptr=penalty(0.0),
        presence_penalty_ptr=penalty(0.0),
        prompt_bin_mask_ptr=to(rng.integers(-(2**31), 2**31, (SLOTS, 3)), torch.int32),
        prompt_bin_mask_stride=3,
        output_bin_counts_ptr=counts,
        output_bin_counts_stride=vocab,
        vocab_size=vocab,
        BLOCK_SIZE=64,
    )
    return Launch((b.logits, 2), args)


@case("_bias_kernel")
def bias(rng: np.random.Generator) -> Launch:
    b, vocab, room = Batch(rng, steps=2), 90, 16
    logits = some_logits(rng, b.logits, vocab)

    def count() -> torch.Tensor:
        return to(rng.integers(1, room + 1, SLOTS) * (rng.random(SLOTS) < 0.6), torch.int32)

    def listed() -> torch.Tensor:
        return to(np.stack([rng.permutation(vocab)[:room] for _ in range(SLOTS)]), torch.int32)

    stop = listed()
    allowed = torch.where(torch.rand(SLOTS, 1, generator=torch.Generator().manual_seed(room)) < 0.5, stop, listed())
    args = dict(
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        vocab_size=vocab,
        expanded_idx_mapping_ptr=to(b.expanded),
        num_allowed_token_ids_ptr=count(),
        allowed_token_ids_ptr=allowed,
        allowed_token_ids_stride=room,
        num_logit_bias_ptr=count(),
        bias_token_ids_ptr=listed(),
        bias_token_ids_stride=room,
        bias_ptr=to(rng.normal(size=(SLOTS, room)), torch.float32),
        bias_stride=room,
        pos_ptr=to(rng.integers(0, 9, b.logits)),
        min_lens_ptr=ints(rng, SLOTS, high=20),
        num_stop_token_ids_ptr=count(),
        restore_when_all_masked_ptr=to(rng.integers(0, 2, SLOTS), torch.int32),
        stop_token_ids_ptr=stop,
        stop_token_ids_stride=room,
        BLOCK_SIZE=room,
        LOGITS_BLOCK_SIZE=64,
        CHECK_ALL_MASKED_ROWS=bool(rng.random() < 0.7),
    )
    return Launch((b.logits,), args)


@case("_bad_words_kernel")
def bad_words(rng: np.random.Generator) -> Launch:
    b, vocab, room = Batch(rng), 3, 5  # so few tokens that prefixes match
    logits = some_logits(rng, b.logits, vocab)
    offsets = np.concatenate((np.zeros((SLOTS, 1)), np.cumsum(rng.integers(1, 5, (SLOTS, room)), axis=1)), axis=1)
    prompt_lens = rng.integers(1, 6, SLOTS)
    args = dict(
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        expanded_idx_mapping_ptr=to(b.expanded),
        bad_word_token_ids_ptr=to(rng.integers(0, vocab, (SLOTS, room * 4)), torch.int32),
        bad_word_token_ids_stride=room * 4,
        bad_word_offsets_ptr=to(offsets, torch.int32),
        bad_word_offsets_stride=room + 1,
        num_bad_words_ptr=to(rng.integers(0, room + 1, SLOTS), torch.int32),
        all_token_ids_ptr=to(rng.integers(0, vocab, (SLOTS, WIDTH)), torch.int32),
        all_token_ids_stride=WIDTH,
        prompt_len_ptr=to(prompt_lens, torch.int32),
        total_len_ptr=to(prompt_lens + rng.integers(0, 5, SLOTS), torch.int32),
        input_ids_ptr=to(rng.integers(0, vocab, b.logits), torch.int32),
        expanded_local_pos_ptr=to(b.local),
    )
    return Launch((b.logits, room), args)


@case("_apply_grammar_bitmask_kernel")
def grammar_bitmask(rng: np.random.Generator) -> Launch:
    b, vocab, stride = Batch(rng), 90, 8
    dtype = (torch.float32, torch.bfloat16)[rng.integers(2)]
    logits = some_logits(rng, b.logits, vocab, dtype)
    places = [r * stride + p for r in range(b.size) if rng.random() < 0.7 for p in range(b.steps + 1)] or [0]
    args = dict(
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        logits_indices_ptr=to(places, torch.int32),
        cu_num_logits_ptr=to(b.logit_starts),
        bitmask_ptr=to(rng.integers(-(2**31), 2**31, (len(places), 3)), torch.int32),
        bitmask_stride=3,
        vocab_size=vocab,
        MASK_STRIDE=stride,
        BLOCK_SIZE=64,
    )
    return Launch((len(places), 2), args)
