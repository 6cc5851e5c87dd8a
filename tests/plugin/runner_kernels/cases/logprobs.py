"""Log-probabilities and ranks."""

import numpy as np
import torch

from tests.plugin.runner_kernels.batch import ints, poison, some_logits
from tests.plugin.runner_kernels.launch import Launch, case


@case("_topk_log_softmax_kernel")
def topk_log_softmax(rng: np.random.Generator) -> Launch:
    rows, vocab, columns = int(rng.integers(1, 9)), 90, int(rng.integers(1, 12))
    logits = some_logits(rng, rows, vocab, (torch.float32, torch.bfloat16)[rng.integers(2)])
    logits[:, 3] = 1.0  # a row masked whole has no probabilities
    args = dict(
        output_ptr=poison(rows, columns, dtype=torch.float32),
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        topk_ids_ptr=ints(rng, rows, columns, high=vocab, dtype=torch.int64),
        topk_ids_stride=columns,
        topk=columns,
        vocab_size=vocab,
        BLOCK_SIZE=64,
        TOPK_BLOCK_SIZE=4,
    )
    return Launch((rows,), args, close=("output_ptr",))


@case("_ranks_kernel")
def ranks(rng: np.random.Generator) -> Launch:
    rows, vocab = int(rng.integers(1, 9)), 90
    logits = some_logits(rng, rows, vocab)
    args = dict(
        output_ptr=poison(rows, dtype=torch.int64),
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        token_ids_ptr=ints(rng, rows, high=vocab, dtype=torch.int64),
        vocab_size=vocab,
        BLOCK_SIZE=64,
    )
    return Launch((rows,), args)
