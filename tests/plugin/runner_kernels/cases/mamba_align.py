"""Recurrent states that are copied between blocks of the cache."""

from typing import Any

import numpy as np
import torch

from tests.plugin.runner_kernels.batch import SLOTS, Batch, ints, poison, to
from tests.plugin.runner_kernels.launch import Launch, case


@case("preprocess_mamba_align_fused_kernel")
def preprocess_align(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    args = dict(
        idx_mapping_ptr=to(b.slots, torch.int32),
        state_idx_ptr=ints(rng, SLOTS, high=6) - 2,
        num_computed_tokens_ptr=to(b.computed, torch.int32),
        query_start_loc_ptr=to(b.starts, torch.int32),
        num_accepted_tokens_ptr=ints(rng, SLOTS, high=5) - 1,
        src_col_ptr=poison(SLOTS),
        src_off_ptr=poison(SLOTS),
        num_reqs=b.size,
        BLOCK_SIZE=16,
        MAMBA_BLOCK_SIZE=8,
    )
    return Launch((1,), args)


def states(rng: np.random.Generator, dim_first: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Two layers in two groups: their windows [blocks, 3, 6] or [blocks, 6, 3] in bfloat16, their states in float32."""
    columns, blocks = 8, 30
    ids = [[rng.permutation(blocks)[:columns] for _ in range(SLOTS)] for _ in range(2)]
    tables = [to(np.array(rows), torch.int32) for rows in ids]
    windows = [to(rng.normal(size=(blocks, 32)), torch.bfloat16) for _ in range(2)]
    recurrent = [to(rng.normal(size=(blocks, 40)), torch.float32) for _ in range(2)]
    caches = [cache for pair in zip(windows, recurrent, strict=True) for cache in pair]
    args = dict(
        block_table_ptrs_ptr=torch.tensor([t.data_ptr() for t in tables], dtype=torch.int64),
        block_table_stride_req=columns,
        state_base_addrs_ptr=torch.tensor([c.data_ptr() for c in caches], dtype=torch.int64),
        state_block_strides_ptr=to([64, 160] * 2, torch.int64),
        state_elem_sizes_ptr=to([2, 4] * 2, torch.int32),
        state_inner_sizes_ptr=to([1 if dim_first else 6, 33] * 2, torch.int64),
        state_conv_widths_ptr=to([3, 0] * 2, torch.int32),
        state_group_indices_ptr=to([0, 0, 1, 1], torch.int32),
        state_dim_row_count_ptr=to([6, 0] * 2 if dim_first else [0] * 4, torch.int32),
        state_dim_row_stride_ptr=to([6, 0] * 2 if dim_first else [0] * 4, torch.int64),
    )
    return args, [*tables, *caches]


def a_few_slots(rng: np.random.Generator) -> torch.Tensor:
    """A request and a row without one: copies of several requests may overlap here, in an order of their own."""
    return to([int(rng.integers(SLOTS)), -1], torch.int32)


@case("precopy_mamba_align_fused_kernel")
def precopy_align(rng: np.random.Generator) -> Launch:
    dim_first = bool(rng.random() < 0.4)
    described, behind = states(rng, dim_first)
    args = dict(
        mamba_state_idx_ptr=ints(rng, SLOTS, high=5) - 1,
        src_col_ptr=ints(rng, SLOTS, high=6) - 2,
        token_bias_ptr=ints(rng, SLOTS, high=4) - 1,
        **described,
        idx_mapping_ptr=a_few_slots(rng),
        num_reqs=2,
        COPY_BLOCK_SIZE=16,
        CONV_STATE_DIM_FIRST=dim_first,
        HAS_IDX_MAPPING=True,
        TEMPORAL_TILES=2,
    )
    return Launch((2, 4, 2), args, behind=behind)


@case("postprocess_mamba_fused_kernel")
def postprocess_align(rng: np.random.Generator) -> Launch:
    dim_first, precomputed = bool(rng.random() < 0.4), bool(rng.random() < 0.6)
    described, behind = states(rng, dim_first)
    computed = ints(rng, SLOTS, high=5) * 8 + ints(rng, SLOTS, high=4) - 2
    args = dict(
        num_accepted_tokens_ptr=ints(rng, SLOTS, high=4),
        mamba_state_idx_ptr=ints(rng, SLOTS, high=5) - 1,
        num_scheduled_tokens_ptr=None if precomputed else ints(rng, SLOTS, high=5) + 3,
        num_computed_tokens_ptr=computed,
        num_draft_tokens_ptr=None if precomputed else ints(rng, SLOTS, high=4) - 1,
        **described,
        num_accepted_tokens_out_ptr=poison(SLOTS),
        idx_mapping_ptr=a_few_slots(rng),
        num_reqs=2,
        block_size=8,
        COPY_BLOCK_SIZE=16,
        CONV_STATE_DIM_FIRST=dim_first,
        HAS_IDX_MAPPING=True,
        PRECOMPUTED_NEW_COMPUTED=precomputed,
        TEMPORAL_TILES=2,
    )
    return Launch((2, 4, 2), args, behind=behind)
