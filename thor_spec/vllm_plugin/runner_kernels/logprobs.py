"""Replacements for ``vllm.v1.worker.gpu.sample.logprob``. Shapes: N logit rows, V tokens of vocabulary, C columns."""
# ruff: noqa: ARG001 - the parameters are the kernels', by which vLLM passes the arguments

import numpy as np
import torch

from thor_spec.vllm_plugin.runner_kernels.arrays import Replaces, floats


def _topk_log_softmax_kernel(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    topk_ids_ptr: torch.Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Write the log probabilities [N, C], float32, of the given tokens [N, C]."""
    logits = floats(logits_ptr)[:, :vocab_size]
    largest = np.fmax.reduce(logits, axis=-1)[:, None]
    log_sum = np.log(np.exp(logits - largest).sum(axis=-1))[:, None]
    chosen = np.take_along_axis(logits, topk_ids_ptr.numpy()[:, :topk], axis=-1)
    output_ptr.numpy()[:, :topk] = chosen - largest - log_sum


def _ranks_kernel(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    token_ids_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Write the rank [N], int64, of the given token [N] in each row: the number of logits not below its own."""
    logits = floats(logits_ptr)[:, :vocab_size]
    chosen = logits[np.arange(len(logits)), token_ids_ptr.numpy()]
    ranks = (logits >= chosen[:, None]).sum(axis=-1)
    # The kernel compares whole blocks, filled up with -inf: below everything but a token that is impossible itself.
    output_ptr.numpy()[:] = ranks + np.where(chosen == -np.inf, -vocab_size % BLOCK_SIZE, 0)


REPLACES: Replaces = {
    "vllm.v1.worker.gpu.sample.logprob": (
        _topk_log_softmax_kernel,
        _ranks_kernel,
    ),
}
