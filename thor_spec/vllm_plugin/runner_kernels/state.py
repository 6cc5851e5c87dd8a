"""Replacements for the small writes to request state, in ``buffer_utils`` and ``model_states.mamba_hybrid``."""
# ruff: noqa: ARG001 - the parameters are the kernels', by which vLLM passes the arguments

from typing import Any

import numpy as np
import torch

from thor_spec.vllm_plugin.runner_kernels.arrays import Replaces, flat, int32_at
from thor_spec.vllm_plugin.runner_kernels.block_table import INT32_BYTES


def _apply_write_kernel(
    output_ptr: torch.Tensor,
    output_stride: Any,
    write_indices_ptr: torch.Tensor,
    write_starts_ptr: torch.Tensor,
    write_contents_ptr: torch.Tensor,
    write_cu_lens_ptr: torch.Tensor,
    write_group_ids_ptr: torch.Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Write W pieces of ``write_contents``, each to a row of the output from an element on; [W] bounds and places.

    Under MULTI_GROUP, which ``write_group_ids`` [W] goes with, ``output`` and ``output_stride`` hold the addresses and
    strides of several int32 outputs.
    """
    contents = write_contents_ptr.numpy()
    ends = write_cu_lens_ptr.tolist()
    pieces = zip(write_indices_ptr.tolist(), write_starts_ptr.tolist(), [0, *ends], ends, strict=False)
    if write_group_ids_ptr is None:
        output = flat(output_ptr)
        for row, start, begin, end in pieces:
            offset = row * output_stride + start
            output[offset : offset + end - begin] = contents[begin:end]
        return
    addresses, strides = output_ptr.tolist(), output_stride.tolist()
    for (row, start, begin, end), group in zip(pieces, write_group_ids_ptr.tolist(), strict=True):
        offset = row * strides[group] + start
        int32_at(addresses[group] + offset * INT32_BYTES, end - begin)[:] = contents[begin:end]


def _scatter_num_accepted_kernel(
    idx_mapping_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_accepted_ptr: torch.Tensor,
) -> None:
    """Write max(num_sampled [R], 1) to the request's slot of ``num_accepted`` [S]; negative slots are skipped."""
    slots = idx_mapping_ptr.numpy()
    num_accepted = np.maximum(num_sampled_ptr.numpy()[: len(slots)], 1)
    real = slots >= 0
    num_accepted_ptr.numpy()[slots[real]] = num_accepted[real]


def _fill_num_accepted_kernel(
    idx_mapping_ptr: torch.Tensor,
    num_accepted_ptr: torch.Tensor,
    num_sampled: int,
) -> None:
    """Write ``num_sampled`` to each request's slot of ``num_accepted`` [S]; negative slots are skipped."""
    slots = idx_mapping_ptr.numpy()
    num_accepted_ptr.numpy()[slots[slots >= 0]] = num_sampled


REPLACES: Replaces = {
    "vllm.v1.worker.gpu.buffer_utils": (_apply_write_kernel,),
    "vllm.v1.worker.gpu.model_states.mamba_hybrid": (_scatter_num_accepted_kernel, _fill_num_accepted_kernel),
}
