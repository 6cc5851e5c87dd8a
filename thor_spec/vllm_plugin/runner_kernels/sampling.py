"""Replacements for ``vllm.v1.worker.gpu.sample.gumbel`` and ``min_p``, and for top-k and top-p.

Shapes: N tokens to sample, S slots of request state, V tokens of vocabulary, B blocks of it.
"""
# ruff: noqa: ARG001 - the parameters are the kernels', by which vLLM passes the arguments

import numpy as np
import torch

from thor_spec.vllm_plugin.runner_kernels.arrays import Replaces, floats, launchable
from thor_spec.vllm_plugin.runner_kernels.noise import sample_in_blocks


def _gumbel_sample_kernel(
    local_argmax_ptr: torch.Tensor,
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    """Write the best token of each block [N, B], int64, and its noised logit, float32 or float64.

    Tokens with a negative slot, and those at temperature 0, get the plain argmax. ``logits_cache`` [S, columns, V]
    keeps the source logits of the others and of greedy requests, in the column of the token or of the launch.
    """
    num_tokens = local_argmax_ptr.shape[0]
    slots = expanded_idx_mapping_ptr.numpy()[:num_tokens]
    real = slots >= 0
    if logits_cache_ptr is not None:
        assert logits_cache_col_ptr is not None
        assert logits_cache_source_ptr is not None
        kept = torch.from_numpy(np.flatnonzero(real))
        column = logits_cache_col_ptr[:num_tokens][kept].long() if PER_TOKEN_COL else int(logits_cache_col_ptr)
        source = logits_cache_source_ptr[kept, :vocab_size]
        logits_cache_ptr[torch.from_numpy(slots[real]).long(), column, :vocab_size] = source
    safe = np.where(real, slots, 0)
    values, tokens = sample_in_blocks(
        floats(logits_ptr)[:num_tokens, :vocab_size],
        np.where(real, floats(temp_ptr)[safe], np.float32(0.0)),
        seeds_ptr.numpy()[safe],
        pos_ptr.numpy()[:num_tokens],
        BLOCK_SIZE,
        fp64=USE_FP64,
        drafting=IS_DRAFTING,
        divide=APPLY_TEMPERATURE,
    )
    local_max_ptr.numpy()[:] = values
    local_argmax_ptr.numpy()[:] = tokens


def _temperature_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Divide the logits [N, V] of every row by its request's temperature, in place; 0 leaves them."""
    temperatures = temperature_ptr[expanded_idx_mapping_ptr[: logits_ptr.shape[0]]].float()
    temperatures[temperatures == 0.0] = 1.0
    logits_ptr[:, :vocab_size].div_(temperatures[:, None])


def _min_p_kernel(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Set to -inf, in place, the logits [N, V] of tokens less than ``min_p`` times as likely as the likeliest."""
    min_p = floats(min_p_ptr)[expanded_idx_mapping_ptr.numpy()[: logits_ptr.shape[0]]]
    logits = logits_ptr.numpy()[:, :vocab_size]
    with np.errstate(divide="ignore"):  # min_p = 0 cuts nothing
        threshold = np.fmax.reduce(logits, axis=-1) + np.log(min_p)
    logits[logits < threshold[:, None]] = -np.inf


@launchable
def _topk_topp_kernel(
    LOGITS: torch.Tensor,
    LOGITS_STRIDE_0: int,
    BUFFER: torch.Tensor,
    PERCENTILE_TO_STD_TABLE: torch.Tensor,
    NORMAL_CDF_TO_SIGMA_TABLE: torch.Tensor,
    K: torch.Tensor,
    P: torch.Tensor,
    BATCH_SIZE: int,
    VOCAB_SIZE: int,
    MASK_VALUE: float,
    BLOCK_SIZE: int,
    BLOCK_SIZE_TRUNC: int,
    TOPK_ENABLED: bool,
    TOPP_ENABLED: bool,
    SPLIT_COVERS_PONLY: bool,
) -> None:
    """Mask, in place, what is not among the K largest logits of a row [N, V], and then not in its top P.

    The top P are the likeliest tokens, renormalised over those that K left, up to the one with which their
    probabilities reach P. Of equal logits, the first stay. K = V and P = 1 cut nothing.
    """
    logits = LOGITS[:BATCH_SIZE, :VOCAB_SIZE]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    cut = torch.zeros_like(ordered, dtype=torch.bool)
    if TOPK_ENABLED:
        cut = torch.arange(VOCAB_SIZE) >= K[:BATCH_SIZE, None]
        ordered = ordered.masked_fill(cut, -torch.inf)
    if TOPP_ENABLED:
        top_p = P[:BATCH_SIZE, None]
        probabilities = ordered.softmax(dim=-1)
        reached_before = probabilities.cumsum(dim=-1) - probabilities
        cut = cut | ((reached_before >= top_p) & (top_p < 1.0))
    cut[:, 0] = False
    logits.masked_fill_(torch.zeros_like(cut).scatter_(1, order, cut), MASK_VALUE)


REPLACES: Replaces = {
    "vllm.v1.worker.gpu.sample.gumbel": (
        _gumbel_sample_kernel,
        _temperature_kernel,
    ),
    "vllm.v1.worker.gpu.sample.min_p": (_min_p_kernel,),
    "vllm.v1.sample.ops.topk_topp_triton": (_topk_topp_kernel,),
}
