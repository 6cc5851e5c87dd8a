"""Inputs of the drafter."""

import numpy as np
import torch
import triton

from tests.plugin.runner_kernels.batch import SLOTS, Batch, ints, poison, to
from tests.plugin.runner_kernels.launch import Launch, case


@case("_prepare_dflash_inputs_kernel")
def dflash_inputs(rng: np.random.Generator) -> Launch:
    steps, anchor = int(rng.integers(1, 16)), bool(rng.random() < 0.3)
    b = Batch(rng, steps=steps)
    queries = steps if anchor else steps + 1
    block = int(rng.choice([8, 16, 256]))
    int64 = torch.int64
    table = to(rng.integers(0, 30, (SLOTS, 6)) * (rng.random((SLOTS, 6)) < 0.8), torch.int32)
    args = dict(
        out_input_ids_ptr=poison(SLOTS * queries),
        out_query_positions_ptr=poison(SLOTS * queries, dtype=int64),
        out_query_start_loc_ptr=poison(SLOTS + 1),
        out_seq_lens_ptr=poison(SLOTS),
        out_query_slot_mapping_ptr=poison(SLOTS * queries + 5, dtype=int64),
        out_context_positions_ptr=poison(b.tokens + 5, dtype=int64),
        out_context_slot_mapping_ptr=poison(b.tokens + 5, dtype=int64),
        out_sample_indices_ptr=poison(SLOTS * steps, dtype=int64),
        out_sample_pos_ptr=poison(SLOTS * steps, dtype=int64),
        out_sample_idx_mapping_ptr=poison(SLOTS * steps),
        out_temperature_ptr=poison(SLOTS, dtype=torch.float32),
        out_seeds_ptr=poison(SLOTS, dtype=int64),
        target_positions_ptr=to(b.positions()),
        target_query_start_loc_ptr=to(b.starts),
        idx_mapping_ptr=to(b.slots),
        last_sampled_ptr=ints(rng, SLOTS, 1, dtype=int64),
        next_prefill_tokens_ptr=ints(rng, 1, SLOTS),
        num_sampled_ptr=to(rng.integers(0, 3, b.size), torch.int32),
        num_rejected_ptr=to(rng.integers(0, b.query_lens), torch.int32),
        temperature_ptr=to(b.temperatures),
        seeds_ptr=to(b.seeds),
        block_table_ptr=table,
        block_table_stride=6,
        parallel_drafting_token_id=261,
        block_size=16,
        num_query_per_req=queries,
        num_speculative_steps=steps,
        max_num_reqs=SLOTS,
        max_num_tokens=SLOTS * queries + 5,
        max_model_len=60,  # some requests are that long
        cp_rank=0,
        SAMPLE_FROM_ANCHOR=anchor,
        PAD_SLOT_ID=-1,
        CP_SIZE=1,
        CP_INTERLEAVE=1,
        BLOCK_SIZE=block,
    )
    return Launch((b.size, triton.cdiv(int(b.query_lens.max()) + queries, block)), args)
