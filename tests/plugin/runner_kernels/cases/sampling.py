"""Sampling: Gumbel noise, temperature, min-p."""

import numpy as np
import torch
import triton

from tests.plugin.runner_kernels.batch import SLOTS, Batch, poison, some_logits, to
from tests.plugin.runner_kernels.launch import Launch, case


def gumbel_launch(rng: np.random.Generator, tokens: int, vocab: int, block: int) -> Launch:
    dtype = (torch.float32, torch.bfloat16)[rng.integers(2)]
    logits, source = some_logits(rng, tokens, vocab, dtype), some_logits(rng, tokens, vocab, dtype)
    blocks, fp64, per_token = triton.cdiv(vocab, block), bool(rng.random() < 0.3), bool(rng.random() < 0.5)
    cached = tokens <= SLOTS and rng.random() < 0.6
    slots = rng.permutation(SLOTS)[:tokens] if cached else rng.integers(0, SLOTS, tokens)
    cache = poison(SLOTS, 3, vocab + 2, dtype=dtype) if cached else None
    temperatures = np.where(rng.random(SLOTS) < 0.2, 0.0, rng.uniform(0.2, 1.5, SLOTS))
    args = dict(
        local_argmax_ptr=poison(tokens, blocks, dtype=torch.int64),
        local_argmax_stride=blocks,
        local_max_ptr=poison(tokens, blocks, dtype=torch.float64 if fp64 else torch.float32),
        local_max_stride=blocks,
        logits_cache_ptr=cache,
        logits_cache_stride_0=0 if cache is None else cache.stride(0),
        logits_cache_stride_1=0 if cache is None else cache.stride(1),
        logits_cache_col_ptr=to(rng.integers(0, 3, tokens) if per_token else 1, torch.int64),
        logits_cache_source_ptr=source if cached else None,
        logits_cache_source_stride=source.stride(0) if cached else 0,
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        expanded_idx_mapping_ptr=to(np.where(rng.random(tokens) < 0.1, -1, slots), torch.int64),
        seeds_ptr=to(rng.integers(-(2**63), 2**63 - 1, SLOTS)),
        pos_ptr=to(rng.integers(0, 99999, tokens)),
        temp_ptr=to(temperatures, torch.float32),
        vocab_size=vocab,
        BLOCK_SIZE=block,
        IS_DRAFTING=bool(rng.random() < 0.5),
        APPLY_TEMPERATURE=bool(rng.random() < 0.5),
        USE_FP64=fp64,
        PER_TOKEN_COL=per_token,
    )
    return Launch((tokens, blocks), args)


@case("_gumbel_sample_kernel")
def gumbel(rng: np.random.Generator) -> Launch:
    return gumbel_launch(rng, int(rng.integers(1, 9)), int(rng.choice([50, 90])), 64)


@case("_temperature_kernel")
def temperature(rng: np.random.Generator) -> Launch:
    b, vocab = Batch(rng), 90
    logits = some_logits(rng, b.logits, vocab)
    temperatures = np.where(rng.random(SLOTS) < 0.3, 1.0, b.temperatures)
    args = dict(
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        expanded_idx_mapping_ptr=to(b.expanded),
        temperature_ptr=to(temperatures, torch.float32),
        vocab_size=vocab,
        BLOCK_SIZE=64,
    )
    return Launch((b.logits, 2), args)


@case("_min_p_kernel")
def min_p(rng: np.random.Generator) -> Launch:
    b, vocab = Batch(rng, steps=2), 90
    logits = some_logits(rng, b.logits, vocab)
    args = dict(
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        expanded_idx_mapping_ptr=to(b.expanded),
        min_p_ptr=to(np.where(rng.random(SLOTS) < 0.4, 0.0, rng.random(SLOTS)), torch.float32),
        vocab_size=vocab,
        BLOCK_SIZE=64,
    )
    return Launch((b.logits,), args)
