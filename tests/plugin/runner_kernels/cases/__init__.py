"""Launches to compare, a module of them for each of ``runner_kernels``; importing them fills ``CASES``."""

from tests.plugin.runner_kernels.cases import (
    block_table,
    dflash,
    input_batch,
    logits,
    logprobs,
    mamba_align,
    rejection,
    resampling,
    sampling,
    state,
)
from tests.plugin.runner_kernels.launch import CASES

__all__ = [
    "CASES",
    "block_table",
    "dflash",
    "input_batch",
    "logits",
    "logprobs",
    "mamba_align",
    "rejection",
    "resampling",
    "sampling",
    "state",
]
