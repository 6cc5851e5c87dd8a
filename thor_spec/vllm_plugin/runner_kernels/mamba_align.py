"""Replacements for ``vllm.v1.worker.mamba_utils``: recurrent states follow their sequences across cache blocks.

Shapes: S slots of request state. State tensors, two per Gated-DeltaNet layer, and the block tables of each group, int32
[S, columns], are given by address.
"""
# ruff: noqa: ARG001 - the parameters are the kernels', by which vLLM passes the arguments

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thor_spec.vllm_plugin.runner_kernels.arrays import Replaces, int32_at
from thor_spec.vllm_plugin.runner_kernels.block_table import INT32_BYTES


def preprocess_mamba_align_fused_kernel(
    idx_mapping_ptr: torch.Tensor,
    state_idx_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_accepted_tokens_ptr: torch.Tensor,
    src_col_ptr: torch.Tensor,
    src_off_ptr: torch.Tensor,
    num_reqs: int,
    BLOCK_SIZE: int,
    MAMBA_BLOCK_SIZE: int,
) -> None:
    """Note in which column each request's state lies, and move on to the column of its last scheduled token [S]."""
    slots = idx_mapping_ptr.numpy()[:num_reqs]
    state_idx, accepted = state_idx_ptr.numpy(), num_accepted_tokens_ptr.numpy()
    before = state_idx[slots]
    src_col_ptr.numpy()[slots] = before
    src_off_ptr.numpy()[slots] = np.maximum(accepted[slots] - 1, 0)
    ends = num_computed_tokens_ptr.numpy()[slots] + np.diff(query_start_loc_ptr.numpy()[: num_reqs + 1])
    after = -(-ends // MAMBA_BLOCK_SIZE) - 1
    state_idx[slots] = after
    accepted[slots[(before >= 0) & (before != after)]] = 1


def precopy_mamba_align_fused_kernel(
    mamba_state_idx_ptr: torch.Tensor,
    src_col_ptr: torch.Tensor,
    token_bias_ptr: torch.Tensor,
    block_table_ptrs_ptr: torch.Tensor,
    block_table_stride_req: int,
    state_base_addrs_ptr: torch.Tensor,
    state_block_strides_ptr: torch.Tensor,
    state_elem_sizes_ptr: torch.Tensor,
    state_inner_sizes_ptr: torch.Tensor,
    state_conv_widths_ptr: torch.Tensor,
    state_group_indices_ptr: torch.Tensor,
    state_dim_row_count_ptr: torch.Tensor,
    state_dim_row_stride_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor | None,
    num_reqs: int,
    COPY_BLOCK_SIZE: int,
    CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = True,
    TEMPORAL_TILES: int = 1,
) -> None:
    """Copy the state of each request that enters another block into it."""
    states = _States(
        block_table_ptrs_ptr, block_table_stride_req, state_base_addrs_ptr, state_block_strides_ptr,
        state_elem_sizes_ptr, state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr,
        state_dim_row_count_ptr, state_dim_row_stride_ptr, CONV_STATE_DIM_FIRST,
    )  # fmt: skip
    for slot in _slots(idx_mapping_ptr, num_reqs):
        source, target = int(src_col_ptr[slot]), int(mamba_state_idx_ptr[slot])
        if source >= 0 and source != target:
            states.copy(slot, source, target, int(token_bias_ptr[slot]))


def postprocess_mamba_fused_kernel(
    num_accepted_tokens_ptr: torch.Tensor,
    mamba_state_idx_ptr: torch.Tensor,
    num_scheduled_tokens_ptr: torch.Tensor | None,
    num_computed_tokens_ptr: torch.Tensor,
    num_draft_tokens_ptr: torch.Tensor | None,
    block_table_ptrs_ptr: torch.Tensor,
    block_table_stride_req: int,
    state_base_addrs_ptr: torch.Tensor,
    state_block_strides_ptr: torch.Tensor,
    state_elem_sizes_ptr: torch.Tensor,
    state_inner_sizes_ptr: torch.Tensor,
    state_conv_widths_ptr: torch.Tensor,
    state_group_indices_ptr: torch.Tensor,
    state_dim_row_count_ptr: torch.Tensor,
    state_dim_row_stride_ptr: torch.Tensor,
    num_accepted_tokens_out_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor | None,
    num_reqs: int,
    block_size: int,
    COPY_BLOCK_SIZE: int,
    CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = False,
    PRECOMPUTED_NEW_COMPUTED: bool = False,
    TEMPORAL_TILES: int = 1,
) -> None:
    """Copy the state at the last block boundary that a request has passed in this step into the block before it."""
    states = _States(
        block_table_ptrs_ptr, block_table_stride_req, state_base_addrs_ptr, state_block_strides_ptr,
        state_elem_sizes_ptr, state_inner_sizes_ptr, state_conv_widths_ptr, state_group_indices_ptr,
        state_dim_row_count_ptr, state_dim_row_stride_ptr, CONV_STATE_DIM_FIRST,
    )  # fmt: skip
    for slot in _slots(idx_mapping_ptr, num_reqs):
        accepted, source = int(num_accepted_tokens_ptr[slot]), int(mamba_state_idx_ptr[slot])
        computed = int(num_computed_tokens_ptr[slot])
        if PRECOMPUTED_NEW_COMPUTED:
            running = computed - accepted + 1
        else:
            assert num_scheduled_tokens_ptr is not None
            assert num_draft_tokens_ptr is not None
            running = computed + int(num_scheduled_tokens_ptr[slot]) - int(num_draft_tokens_ptr[slot])
            computed = running + accepted - 1
        boundary = computed // block_size * block_size
        if boundary < running:
            continue
        bias, target = boundary - running, boundary // block_size - 1
        if source == target:
            num_accepted_tokens_out_ptr[slot] = 1
        if source != target or bias:
            states.copy(slot, source, target, bias)


def _slots(idx_mapping: torch.Tensor | None, num_reqs: int) -> list[int]:
    slots = range(num_reqs) if idx_mapping is None else idx_mapping.tolist()[:num_reqs]
    return [slot for slot in slots if slot >= 0]


@dataclass(frozen=True, slots=True)
class _States:
    """State tensors by address, as the kernels get them."""

    tables: torch.Tensor
    table_stride: int
    bases: torch.Tensor
    strides: torch.Tensor
    element_sizes: torch.Tensor
    inner_sizes: torch.Tensor
    widths: torch.Tensor
    groups: torch.Tensor
    channels: torch.Tensor
    channel_strides: torch.Tensor
    dim_first: bool

    def copy(self, slot: int, source: int, target: int, bias: int) -> None:
        """Copy every state of the request in ``slot`` from a column of its block table to another.

        A window moves on by ``bias`` tokens; a recurrent state is taken from that many columns further on.
        """
        columns = max(source + bias, source, target) + 1
        tables = [self._row(int(table), slot, columns) for table in self.tables.tolist()]
        described: Any = zip(
            *(x.tolist() for x in (self.bases, self.strides, self.element_sizes, self.inner_sizes, self.widths)),
            *(x.tolist() for x in (self.groups, self.channels, self.channel_strides)),
            strict=True,
        )
        for base, stride, size, inner, width, group, channels, channel_stride in described:
            table = tables[group]
            to = base + int(table[target]) * stride
            if width == 0:
                ctypes.memmove(to, base + int(table[source + bias]) * stride, inner * size)
                continue
            start, kept = base + int(table[source]) * stride, width - bias
            if not self.dim_first:
                ctypes.memmove(to, start + bias * inner * size, kept * inner * size)
                continue
            for channel in range(channels):
                offset = channel * channel_stride
                ctypes.memmove(to + offset, start + offset + bias * size, kept * size)

    def _row(self, address: int, slot: int, columns: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return int32_at(address + slot * self.table_stride * INT32_BYTES, columns)


REPLACES: Replaces = {
    "vllm.v1.worker.mamba_utils": (
        preprocess_mamba_align_fused_kernel,
        precopy_mamba_align_fused_kernel,
        postprocess_mamba_fused_kernel,
    ),
}
