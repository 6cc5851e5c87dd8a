"""Staged writes, and how many tokens were accepted."""

import numpy as np
import torch

from tests.plugin.runner_kernels.batch import SLOTS, Batch, addresses, poison, to
from tests.plugin.runner_kernels.launch import Launch, case


def writes(rng: np.random.Generator, count: int, longest: int) -> dict[str, np.ndarray]:
    lengths = rng.integers(1, longest + 1, count)
    return dict(
        write_indices_ptr=rng.permutation(SLOTS)[:count],
        write_starts_ptr=rng.integers(0, 4, count),
        write_contents_ptr=rng.integers(0, 99, lengths.sum()),
        write_cu_lens_ptr=np.cumsum(lengths),
    )


@case("_apply_write_kernel")
def apply_write(rng: np.random.Generator) -> Launch:
    count = int(rng.integers(1, 6))
    dtype = (torch.int32, torch.int64, torch.float32)[rng.integers(3)]
    flat = rng.random() < 0.3  # one element per slot
    made = {name: to(x, torch.int32) for name, x in writes(rng, count, 1 if flat else 20).items()}
    made["write_contents_ptr"] = made["write_contents_ptr"].to(dtype)
    if flat:
        made["write_starts_ptr"].zero_()
    output = poison(SLOTS, dtype=dtype) if flat else poison(SLOTS, 24, dtype=dtype)
    rest = dict(write_group_ids_ptr=None, BLOCK_SIZE=8, MULTI_GROUP=False)
    return Launch((count,), dict(output_ptr=output, output_stride=output.stride(0), **made, **rest))


@case("_apply_write_kernel")
def apply_write_to_groups(rng: np.random.Generator) -> Launch:
    count, strides = int(rng.integers(1, 6)), [24, 31]
    made = {name: to(x, torch.int32) for name, x in writes(rng, count, 20).items()}
    outputs = [poison(SLOTS, n) for n in strides]
    args = dict(
        output_ptr=addresses(outputs),
        output_stride=to(strides, torch.int64),
        **made,
        write_group_ids_ptr=to(rng.integers(0, 2, count), torch.int32),
        BLOCK_SIZE=8,
        MULTI_GROUP=True,
    )
    return Launch((count,), args, behind=outputs)


@case("_scatter_num_accepted_kernel")
def scatter_num_accepted(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    args = dict(
        idx_mapping_ptr=to(np.where(rng.random(b.size) < 0.3, -1, b.slots)),
        num_sampled_ptr=to(rng.integers(0, 9, b.size), torch.int32),
        num_accepted_ptr=poison(SLOTS),
    )
    return Launch((b.size,), args)


@case("_fill_num_accepted_kernel")
def fill_num_accepted(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    idx_mapping = to(np.where(rng.random(b.size) < 0.3, -1, b.slots))
    return Launch((b.size,), dict(idx_mapping_ptr=idx_mapping, num_accepted_ptr=poison(SLOTS), num_sampled=3))
