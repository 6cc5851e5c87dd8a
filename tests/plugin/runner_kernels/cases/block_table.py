"""Block tables, slots of the cache, and blocks that are zeroed."""

import numpy as np
import torch

from tests.plugin.runner_kernels.batch import SLOTS, Batch, addresses, ints, poison, to
from tests.plugin.runner_kernels.launch import Launch, case


@case("_gather_block_tables_kernel")
def gather_block_tables(rng: np.random.Generator) -> Launch:
    """All slots are padded to: the kernel is told how many by its grid, the replacement cannot see it."""
    b, strides = Batch(rng), [5, 12]
    source, target = [ints(rng, SLOTS, n) for n in strides], [poison(SLOTS, n) for n in strides]
    num_blocks = to(np.stack([rng.integers(0, n + 1, SLOTS) for n in strides]), torch.int32)
    args = dict(
        batch_idx_to_req_idx=to(b.slots),
        src_block_table_ptrs=addresses(source),
        dst_block_table_ptrs=addresses(target),
        block_table_strides=to(strides, torch.int64),
        num_blocks_ptr=num_blocks,
        num_blocks_stride=SLOTS,
        num_reqs=b.size,
        BLOCK_SIZE=8,
    )
    return Launch((len(strides), SLOTS), args, behind=(*source, *target))


@case("_compute_slot_mappings_kernel")
def slot_mappings(rng: np.random.Generator) -> Launch:
    b, strides, sizes = Batch(rng), [30, 4, 3], [16, 48, 64]
    tables = [ints(rng, SLOTS, n) for n in strides]
    mappings = poison(3, b.tokens + 9, dtype=torch.int64)
    everyone = rng.random() < 0.5
    args = dict(
        max_num_tokens=mappings.shape[1],
        idx_mapping=to(b.slots if everyone else np.where(rng.random(b.size) < 0.5, -1, b.slots)),
        query_start_loc=to(b.starts),
        pos=to(b.positions()),
        block_table_ptrs=addresses(tables),
        block_table_strides=to(strides, torch.int64),
        block_sizes=to(sizes, torch.int32),
        slot_mapping_enabled=to([True, rng.random() < 0.5, True]),
        dcp_sharded=to([True] * 3),
        slot_mappings_ptr=mappings,
        slot_mappings_stride=mappings.stride(0),
        cp_rank=0,
        CP_SIZE=1,
        CP_INTERLEAVE=1,
        PAD_ID=-1,
        TRITON_BLOCK_SIZE=16,
    )
    return Launch((3, b.size + 1), args, behind=tables)


@case("_zero_kv_blocks_kernel")
def zero_kv_blocks(rng: np.random.Generator) -> Launch:
    strides, pages = [20, 33], [20, 7]
    caches = [ints(rng, 9 * n + 4) for n in strides]
    args = dict(
        seg_addrs_ptr=torch.tensor([c.data_ptr() + 16 for c in caches], dtype=torch.uint64),
        seg_block_strides_ptr=to(strides, torch.int64),
        seg_page_sizes_ptr=to(pages, torch.int64),
        block_ids_ptr=to(rng.permutation(9)[: rng.integers(1, 5)], torch.int64),
        BLOCK_SIZE=8,
    )
    return Launch((len(args["block_ids_ptr"]), 2, 3), args, behind=caches)
