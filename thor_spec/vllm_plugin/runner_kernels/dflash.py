"""Replacement for the input preparation in ``vllm.v1.worker.gpu.spec_decode.dflash.speculator``."""
# ruff: noqa: ARG001 - the parameters are the kernel's, by which vLLM passes the arguments

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thor_spec.vllm_plugin.runner_kernels.arrays import Replaces, flat, require_one_rank


def _prepare_dflash_inputs_kernel(
    out_input_ids_ptr: torch.Tensor,
    out_query_positions_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor,
    out_seq_lens_ptr: torch.Tensor,
    out_query_slot_mapping_ptr: torch.Tensor,
    out_context_positions_ptr: torch.Tensor,
    out_context_slot_mapping_ptr: torch.Tensor,
    out_sample_indices_ptr: torch.Tensor,
    out_sample_pos_ptr: torch.Tensor,
    out_sample_idx_mapping_ptr: torch.Tensor,
    out_temperature_ptr: torch.Tensor,
    out_seeds_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    target_query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    BLOCK_SIZE: int,
) -> None:
    """Lay out one drafting pass from the target's last step.

    Shapes: R requests in the batch, S slots of request state, T target tokens, Q queries and K sampled drafts per
    request. The tokens that the target kept become context [T], rejected ones position 0 without a slot. Each request
    then has Q queries [R * Q]: its last token and mask tokens, at the positions that follow, and K samples [R * K] of
    them. The drafter writes no cache block 0, which stands for "none". Every buffer is padded past the batch.
    """
    require_one_rank(CP_SIZE)
    num_query, num_steps = num_query_per_req, num_speculative_steps
    input_ids, query_positions = out_input_ids_ptr.numpy(), out_query_positions_ptr.numpy()
    query_slots, query_start_loc = out_query_slot_mapping_ptr.numpy(), out_query_start_loc_ptr.numpy()
    seq_lens = out_seq_lens_ptr.numpy()
    context_positions, context_slots = out_context_positions_ptr.numpy(), out_context_slot_mapping_ptr.numpy()
    sample_indices, sample_pos = out_sample_indices_ptr.numpy(), out_sample_pos_ptr.numpy()
    sample_slots = out_sample_idx_mapping_ptr.numpy()
    target_positions, block_table = target_positions_ptr.numpy(), block_table_ptr.numpy()
    last_sampled, next_prefill = flat(last_sampled_ptr), flat(next_prefill_tokens_ptr)
    starts, num_sampled, num_rejected = (
        target_query_start_loc_ptr.tolist(),
        num_sampled_ptr.tolist(),
        num_rejected_ptr.tolist(),
    )
    slots = idx_mapping_ptr.numpy()
    num_reqs = len(slots)
    skipped = 0 if SAMPLE_FROM_ANCHOR else 1
    offsets = np.arange(num_query)

    def cache_slots(request: int, positions: NDArray[Any]) -> NDArray[Any]:
        block, offset = np.divmod(positions, block_size)
        ids = block_table[request, np.minimum(block, block_table_stride - 1)].astype(np.int64)
        return np.where(ids != 0, ids * block_size + offset, PAD_SLOT_ID)

    for request, slot in enumerate(slots.tolist()):
        start, end = starts[request], starts[request + 1]
        valid_end = end - num_rejected[request]
        kept = target_positions[start:valid_end]
        context_positions[start:valid_end] = kept
        context_slots[start:valid_end] = cache_slots(request, kept)
        context_positions[valid_end:end] = 0
        context_slots[valid_end:end] = PAD_SLOT_ID

        first = int(target_positions[valid_end - 1]) + 1
        positions = first + offsets
        query = request * num_query
        input_ids[query : query + num_query] = parallel_drafting_token_id
        input_ids[query] = last_sampled[slot] if num_sampled[request] > 0 else next_prefill[slot]
        query_positions[query : query + num_query] = np.minimum(positions, max_model_len - 1)
        query_slots[query : query + num_query] = cache_slots(request, positions)
        query_start_loc[request] = query
        seq_lens[request] = min(first + num_query, max_model_len)

        sample, count = request * num_steps, num_query - skipped
        sample_indices[sample : sample + count] = query + skipped + offsets[:count]
        sample_pos[sample : sample + count] = positions[skipped:] + (1 - skipped)
        sample_slots[sample : sample + count] = slot

    out_temperature_ptr.numpy()[slots] = temperature_ptr.numpy()[slots]
    out_seeds_ptr.numpy()[slots] = seeds_ptr.numpy()[slots]
    query_start_loc[num_reqs : max_num_reqs + 1] = num_reqs * num_query
    seq_lens[num_reqs:max_num_reqs] = 0
    unused = slice(num_reqs * num_steps, max_num_reqs * num_steps)
    sample_indices[unused], sample_pos[unused], sample_slots[unused] = 0, 0, -1
    query_slots[num_reqs * num_query : max_num_tokens] = PAD_SLOT_ID


REPLACES: Replaces = {
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator": (_prepare_dflash_inputs_kernel,),
}
