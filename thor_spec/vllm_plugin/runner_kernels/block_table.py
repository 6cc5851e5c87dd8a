"""Replacements for ``vllm.v1.worker.gpu.block_table`` and the zeroing of cache blocks in ``vllm.v1.worker.utils``.

Shapes: G KV cache groups, R requests in the batch, S slots of request state, T tokens. Block tables are int32
[S, blocks] and given by address, one per group.
"""
# ruff: noqa: ARG001 - the parameters are the kernels', by which vLLM passes the arguments

import ctypes

import numpy as np
import torch

from thor_spec.vllm_plugin.runner_kernels.arrays import Replaces, int32_at, require_one_rank

INT32_BYTES = 4


def _gather_block_tables_kernel(
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks_ptr: torch.Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Copy the used part of each request's row to the batch's block tables; ``num_blocks`` is [G, S].

    The kernel zeroes the rows of padding requests, whose number only the launch grid holds. Zero all rows past the
    batch instead: the batch's tables have S rows like their sources (prefill context parallelism, which has smaller
    ones, needs GPUs).
    """
    num_blocks = num_blocks_ptr.numpy()
    slots = batch_idx_to_req_idx.tolist()[:num_reqs]
    num_slots = num_blocks.shape[1]
    addresses = zip(
        src_block_table_ptrs.tolist(), dst_block_table_ptrs.tolist(), block_table_strides.tolist(), strict=True
    )
    for group, (source, target, stride) in enumerate(addresses):
        for request, slot in enumerate(slots):
            used = int(num_blocks[group, slot])
            ctypes.memmove(
                target + request * stride * INT32_BYTES, source + slot * stride * INT32_BYTES, used * INT32_BYTES
            )
        ctypes.memset(target + num_reqs * stride * INT32_BYTES, 0, (num_slots - num_reqs) * stride * INT32_BYTES)


def _compute_slot_mappings_kernel(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    dcp_sharded: torch.Tensor,
    slot_mappings_ptr: torch.Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Write the cache slot of every token to ``slot_mappings`` [G, T], int64.

    ``PAD_ID`` where there is none: past the batch, in groups without a mapping, for requests with a negative slot.
    """
    require_one_rank(CP_SIZE)
    slot_mappings = slot_mappings_ptr.numpy()
    slots = idx_mapping.numpy()
    starts = query_start_loc.numpy()[: len(slots) + 1]
    first, last = int(starts[0]), int(starts[-1])
    slot_mappings[:, first:max_num_tokens] = PAD_ID
    if first == last:
        return
    slot_of_token = np.repeat(slots, np.diff(starts))
    real = slot_of_token >= 0
    everyone = bool(real.all())
    positions = pos.numpy()[first:last]
    if not everyone:
        slot_of_token, positions = slot_of_token[real], positions[real]
    rows = int(slots.max()) + 1
    enabled, addresses = slot_mapping_enabled.tolist(), block_table_ptrs.tolist()
    strides, sizes = block_table_strides.tolist(), block_sizes.tolist()
    for group in range(len(addresses)):
        if not enabled[group] or rows == 0:
            continue
        block, offset = np.divmod(positions, sizes[group])
        table = int32_at(addresses[group], rows * strides[group])
        found = table[slot_of_token * strides[group] + block].astype(np.int64) * sizes[group] + offset
        if everyone:
            slot_mappings[group, first:last] = found
        else:
            slot_mappings[group, first:last][real] = found


def _zero_kv_blocks_kernel(
    seg_addrs_ptr: torch.Tensor,
    seg_block_strides_ptr: torch.Tensor,
    seg_page_sizes_ptr: torch.Tensor,
    block_ids_ptr: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Zero the given blocks in every segment of the KV cache; strides and page sizes are in int32 elements."""
    block_ids = block_ids_ptr.tolist()
    segments = zip(seg_addrs_ptr.tolist(), seg_block_strides_ptr.tolist(), seg_page_sizes_ptr.tolist(), strict=True)
    for address, stride, page_size in segments:
        for block in block_ids:
            ctypes.memset(address + block * stride * INT32_BYTES, 0, page_size * INT32_BYTES)


REPLACES: Replaces = {
    "vllm.v1.worker.gpu.block_table": (
        _gather_block_tables_kernel,
        _compute_slot_mappings_kernel,
    ),
    "vllm.v1.worker.utils": (_zero_kv_blocks_kernel,),
}
