"""Every replacement leaves the memory that the interpreted kernel leaves, and the engine the same tokens.

A case builds the arguments of one launch from a seed, with every output filled with nonsense. It is built twice: the
kernel runs on one copy, its replacement on the other, and all tensors must then agree, bit for bit unless the case
says which sums may be added in another order.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from thor_spec import env
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import runner_kernels
from thor_spec.vllm_plugin.runner_kernels import noise
from thor_spec.vllm_plugin.seam import Seam

pytestmark = pytest.mark.skipif(not env.triton_interprets(), reason="not run: kernels are compiled here")

SLOTS, WIDTH, POISON = 10, 96, -77
SEAMS = {seam.target.split(":")[1]: seam for seam in runner_kernels.SEAMS}
OURS = {name.rpartition(".")[2]: kernel for name, kernel in runner_kernels.REPLACEMENTS.items()}
INF = float("inf")


@dataclass
class Launch:
    grid: tuple[int, ...]
    args: dict[str, Any]
    behind: Sequence[torch.Tensor] = ()
    """Tensors that are passed by address."""
    close: Sequence[str] = ()
    """Sums of float32, which the kernel adds over a padded block and so in another order: equal to 1e-6."""


Case = Callable[[np.random.Generator], Launch]
CASES: dict[str, tuple[Case, ...]] = {}


def case(kernel: str) -> Callable[[Case], Case]:
    def register(build: Case) -> Case:
        CASES[kernel] = (*CASES.get(kernel, ()), build)
        return build

    return register


def run(kernel: str, build: Case, seed: int, launch: Callable[..., Any], *, ours: bool) -> Launch:
    made = build(np.random.default_rng(seed))
    if ours:
        launch(**made.args)
    else:
        launch[made.grid](*made.args.values())  # type: ignore[index]
    return made


def assert_same(kernel: str, build: Case, seed: int) -> Launch:
    want = run(kernel, build, seed, SEAMS[kernel].resolve(), ours=False)
    got = run(kernel, build, seed, OURS[kernel], ours=True)
    tensors = [(name, a, got.args[name]) for name, a in want.args.items() if isinstance(a, torch.Tensor)]
    tensors += [(f"memory {i}", a, b) for i, (a, b) in enumerate(zip(want.behind, got.behind, strict=True))]
    for name, a, b in tensors:
        if a.dtype == torch.uint64 or name in ("block_table_ptrs_ptr", "state_base_addrs_ptr"):
            continue  # addresses
        budget = 1e-6 if name in want.close else 0.0
        torch.testing.assert_close(b, a, rtol=budget, atol=budget, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
    return want


# Parts of a batch -----------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Requests in random slots: whole prompts, chunks of prompts, decodes with and without drafts."""

    rng: np.random.Generator
    steps: int = 7
    size: int = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng
        self.size = int(rng.integers(1, 9))
        self.slots = rng.permutation(SLOTS)[: self.size].astype(np.int64)
        self.drafts = rng.integers(0, self.steps + 1, self.size) * (rng.random(self.size) < 0.8)
        prefilling = rng.random(self.size) < 0.4
        self.prefill_lens = rng.integers(4, 40, SLOTS).astype(np.int32)
        done = self.prefill_lens[self.slots] + rng.integers(0, 20, self.size)
        done = np.where(prefilling, rng.integers(0, self.prefill_lens[self.slots]), done)
        self.computed = rng.integers(0, 9, SLOTS).astype(np.int32)
        self.computed[self.slots] = done
        rest = self.prefill_lens[self.slots] - done
        chunk = np.maximum(rest - rng.integers(-2, 4, self.size), 1)  # ends before, at, or just after the prompt
        self.query_lens = np.where(prefilling, np.maximum(chunk, self.drafts + 1), self.drafts + 1)
        self.seq_lens = done + self.query_lens
        self.starts = np.concatenate(([0], np.cumsum(self.query_lens))).astype(np.int32)
        self.logit_starts = np.concatenate(([0], np.cumsum(self.drafts + 1))).astype(np.int32)
        self.tokens, self.logits = int(self.starts[-1]), int(self.logit_starts[-1])
        self.expanded = np.repeat(self.slots, self.drafts + 1)
        self.local = np.concatenate([np.arange(n + 1) for n in self.drafts]).astype(np.int32)
        self.temperatures = np.where(rng.random(SLOTS) < 0.4, 0.0, rng.uniform(0.3, 1.5, SLOTS)).astype(np.float32)
        self.seeds = rng.integers(-(2**63), 2**63 - 1, SLOTS)

    def positions(self) -> np.ndarray:
        lengths = zip(self.seq_lens, self.query_lens, strict=True)
        return np.concatenate([np.arange(end - length, end) for end, length in lengths]).astype(np.int64)


def to(array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(np.ascontiguousarray(array), dtype=dtype)


def poison(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else POISON, dtype=dtype)


def ints(rng: np.random.Generator, *shape: int, high: int = 300, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return to(rng.integers(1, high, shape), dtype)


def some_logits(rng: np.random.Generator, rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits as a view of a wider tensor; masked here and there, equal here and there, one row masked whole."""
    logits = np.round(rng.normal(0, 3, (rows, vocab + 7)), int(rng.integers(1, 7)))
    logits[rng.random(logits.shape) < 0.1] = -INF
    if rng.random() < 0.3:
        logits[rng.integers(rows)] = -INF
    return to(logits, dtype)[:, :vocab]


def addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


# Input batch ----------------------------------------------------------------------------------------------------------


@case("_prepare_prefill_inputs_kernel")
def prefill_inputs(rng: np.random.Generator) -> Launch:
    b, lookahead = Batch(rng), int(rng.integers(1, 4))
    upcoming, token_ids = poison(lookahead, SLOTS), ints(rng, SLOTS, WIDTH)
    args = dict(
        input_ids_ptr=poison(b.tokens + 3),
        next_prefill_tokens_ptr=upcoming,
        next_prefill_tokens_stride=upcoming.stride(0),
        num_lookahead=lookahead,
        idx_mapping_ptr=to(b.slots),
        query_start_loc_ptr=to(b.starts),
        all_token_ids_ptr=token_ids,
        all_token_ids_stride=WIDTH,
        prefill_lens_ptr=to(b.prefill_lens),
        num_computed_tokens_ptr=to(b.computed),
        BLOCK_SIZE=16,
        LOOKAHEAD_BLOCK=triton.next_power_of_2(lookahead),
    )
    return Launch((b.size,), args)


@case("_prepare_pos_seq_lens_kernel")
def pos_seq_lens(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    args = dict(
        pos_ptr=poison(b.tokens + 3, dtype=torch.int64),
        seq_lens_ptr=poison(SLOTS + 1),
        idx_mapping_ptr=to(b.slots),
        query_start_loc_ptr=to(np.append(b.starts, b.tokens)),
        num_computed_tokens_ptr=to(b.computed),
        max_num_reqs=SLOTS,
        BLOCK_SIZE=16,
    )
    return Launch((b.size + 1,), args)


@case("_combine_sampled_and_draft_tokens_kernel")
def combine(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    bonus = int(rng.random() < 0.8)
    logit_starts = np.concatenate(([0], np.cumsum(b.drafts + bonus))).astype(np.int32)
    args = dict(
        input_ids_ptr=ints(rng, b.tokens),
        idx_mapping_ptr=to(b.slots),
        last_sampled_tokens_ptr=ints(rng, SLOTS, 1, dtype=torch.int64),
        query_start_loc_ptr=to(b.starts),
        seq_lens_ptr=to(b.seq_lens, torch.int32),
        prefill_len_ptr=to(b.prefill_lens),
        draft_tokens_ptr=ints(rng, SLOTS, b.steps, dtype=torch.int64),
        draft_tokens_stride=b.steps,
        cu_num_logits_ptr=to(logit_starts),
        logits_indices_ptr=poison(int(logit_starts[-1]), dtype=torch.int64),
        BLOCK_SIZE=triton.next_power_of_2(b.steps + bonus),
        NUM_NEW_SAMPLED_TOKENS=bonus,
    )
    return Launch((b.size,), args)


@case("_get_num_sampled_and_rejected_kernel")
def num_sampled_and_rejected(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    args = dict(
        num_sampled_ptr=to(rng.integers(1, b.drafts + 2), torch.int32),
        num_rejected_ptr=poison(b.size),
        seq_lens_ptr=to(b.seq_lens, torch.int32),
        cu_num_logits_ptr=to(b.logit_starts),
        idx_mapping_ptr=to(b.slots),
        prefill_len_ptr=to(b.prefill_lens),
    )
    return Launch((b.size,), args)


@case("_post_update_kernel")
def post_update(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    counted, vocab = rng.random() < 0.6, 6  # so small that tokens repeat
    counts = ints(rng, SLOTS, vocab) if counted else None
    args = dict(
        idx_mapping_ptr=to(np.where(rng.random(b.size) < 0.2, -1, b.slots)),
        num_computed_tokens_ptr=to(b.computed),
        last_sampled_tokens_ptr=ints(rng, SLOTS, 1, dtype=torch.int64),
        output_bin_counts_ptr=counts,
        output_bin_counts_stride=vocab if counted else 0,
        sampled_tokens_ptr=ints(rng, b.size, b.steps + 1, high=vocab, dtype=torch.int64),
        sampled_tokens_stride=b.steps + 1,
        num_sampled_ptr=to(rng.integers(0, b.drafts + 2), torch.int32),
        num_rejected_ptr=to(rng.integers(0, b.drafts + 1), torch.int32),
        query_start_loc_ptr=to(b.starts) if rng.random() < 0.8 else None,
        all_token_ids_ptr=ints(rng, SLOTS, WIDTH),
        all_token_ids_stride=WIDTH,
        total_len_ptr=to(b.prefill_lens),
    )
    return Launch((b.size,), args)


@case("_expand_idx_mapping_kernel")
def expand(rng: np.random.Generator) -> Launch:
    b = Batch(rng, steps=int(rng.integers(0, 16)))
    args = dict(
        idx_mapping_ptr=to(b.slots),
        expanded_idx_mapping_ptr=poison(b.logits + 2, dtype=torch.int64),
        expanded_local_pos_ptr=poison(b.logits + 2),
        cu_num_logits_ptr=to(b.logit_starts),
        BLOCK_SIZE=triton.next_power_of_2(b.steps + 1),
    )
    return Launch((b.size,), args)


# Block tables and state -----------------------------------------------------------------------------------------------


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


# Recurrent states and cache blocks ------------------------------------------------------------------------------------


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


# Drafting and verification --------------------------------------------------------------------------------------------


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


@case("_gather_draft_sampled_kernel")
def gather_draft_sampled(rng: np.random.Generator) -> Launch:
    b = Batch(rng)
    ends = np.repeat(b.starts[1:] - b.drafts - 1, b.drafts + 1)
    args = dict(
        draft_sampled_ptr=poison(b.logits),
        pos_ptr=poison(b.logits, dtype=torch.int64),
        input_ids_ptr=ints(rng, b.tokens),
        positions_ptr=to(b.positions()),
        logits_indices_ptr=to(ends + b.local, torch.int64),
        expanded_idx_mapping_ptr=to(b.expanded),
        expanded_local_pos_ptr=to(b.local),
        prefill_len_ptr=to(b.prefill_lens),
        num_logits=b.logits,
        BLOCK_SIZE=16,
    )
    return Launch((triton.cdiv(b.logits, 16),), args)


def two_models(rng: np.random.Generator, b: Batch, vocab: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The target's logits, divided by the temperature, and the drafter's, which are like them and not divided."""
    dtype = (torch.float32, torch.bfloat16)[rng.integers(2)]
    target = some_logits(rng, b.logits, vocab + 5, dtype)
    if rng.random() < 0.5:
        return target[:, :vocab], None
    draft = torch.randn(SLOTS, b.steps, vocab, generator=torch.Generator().manual_seed(int(rng.integers(99))))
    for row, (slot, place) in enumerate(zip(b.expanded, b.local, strict=True)):
        if place < b.steps:
            scale = float(b.temperatures[slot]) or 1.0
            draft[slot, place] = draft[slot, place] * 0.3 + target[row, :vocab].float() * scale
    return target, draft.to(dtype)


@case("_compute_local_logits_stats_kernel")
def logits_stats(rng: np.random.Generator) -> Launch:
    b, vocab, block = Batch(rng, steps=int(rng.integers(0, 8))), int(rng.choice([40, 90])), 32
    target, draft = two_models(rng, b, vocab)
    blocks = triton.cdiv(vocab, block)
    args: dict[str, Any] = {}
    for name in (
        "target_local_argmax",
        "target_local_max",
        "target_local_sumexp",
        "draft_local_max",
        "draft_local_sumexp",
    ):
        dtype = torch.int64 if "argmax" in name else torch.float32
        args |= {f"{name}_ptr": poison(b.logits, blocks, dtype=dtype), f"{name}_stride": blocks}
    args |= dict(
        target_logits_ptr=target,
        target_logits_stride=target.stride(0),
        draft_logits_ptr=draft,
        draft_logits_stride_0=0 if draft is None else draft.stride(0),
        draft_logits_stride_1=0 if draft is None else draft.stride(1),
        expanded_idx_mapping_ptr=to(b.expanded),
        expanded_local_pos_ptr=to(b.local),
        temp_ptr=to(b.temperatures),
        vocab_size=vocab,
        num_speculative_steps=b.steps,
        BLOCK_SIZE=block,
        HAS_DRAFT_LOGITS=draft is not None,
    )
    return Launch((b.logits, blocks), args, close=("target_local_sumexp_ptr", "draft_local_sumexp_ptr"))


def blocked(logits: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return argmax, maximum and sum of exponentials of each block, [rows, blocks]."""
    padded = torch.nn.functional.pad(logits.float(), (0, -logits.shape[-1] % block), value=-INF)
    parts = padded.unflatten(-1, (-1, block))
    largest, index = parts.max(-1)
    sumexp = (parts - largest.nan_to_num(neginf=0.0)[..., None]).exp().sum(-1)
    return index + torch.arange(parts.shape[-2]) * block, largest, sumexp


@case("_rejection_kernel")
def rejection(rng: np.random.Generator) -> Launch:
    b, vocab, block = Batch(rng, steps=int(rng.integers(1, 16))), 90, 32
    target, draft = two_models(rng, b, vocab)
    argmax, largest, sumexp = blocked(target[:, :vocab], block)
    rows = torch.zeros(b.logits, vocab)
    if draft is not None:
        for row, (slot, place) in enumerate(zip(b.expanded, b.local, strict=True)):
            if place < b.steps:
                rows[row] = draft[slot, place].float() / max(float(b.temperatures[slot]), 1e-3)
    _, draft_max, draft_sumexp = blocked(rows, block)
    drafts = rng.integers(-1, vocab, b.logits)
    likely = rng.random(b.logits) < 0.8
    drafts[1:] = np.where(likely[1:], target[:-1, :vocab].float().argmax(-1).numpy(), drafts[1:])
    drafts[rng.random(b.logits) < 0.1] = -1
    synthetic = rng.random() < 0.3
    args: dict[str, Any] = dict(
        sampled_ptr=poison(b.size, b.steps + 1, dtype=torch.int64),
        sampled_stride=b.steps + 1,
        rejected_steps_ptr=poison(b.size),
        target_rejected_logsumexp_ptr=poison(b.size, dtype=torch.float32),
        draft_rejected_logsumexp_ptr=poison(b.size, dtype=torch.float32),
        target_logits_ptr=target,
        target_logits_stride=target.stride(0),
    )
    statistics = dict(target_local_argmax=argmax, target_local_max=largest, target_local_sumexp=sumexp)
    args |= {f"{n}_{part}": x if part == "ptr" else 3 for n, x in statistics.items() for part in ("ptr", "stride")}
    args |= dict(
        draft_sampled_ptr=to(drafts, torch.int32),
        draft_logits_ptr=draft,
        draft_logits_stride_0=0 if draft is None else draft.stride(0),
        draft_logits_stride_1=0 if draft is None else draft.stride(1),
        draft_local_max_ptr=draft_max,
        draft_local_max_stride=3,
        draft_local_sumexp_ptr=draft_sumexp,
        draft_local_sumexp_stride=3,
        cu_num_logits_ptr=to(b.logit_starts),
        idx_mapping_ptr=to(b.slots),
        temp_ptr=to(b.temperatures),
        seed_ptr=to(b.seeds),
        pos_ptr=to(rng.integers(0, 9999, b.logits)),
        synthetic_conditional_rates_ptr=to(rng.uniform(0.5, 1.0, b.steps), torch.float32) if synthetic else None,
        cumulative_log_p_ptr=None,
        local_residual_mass_ptr=None,
        local_residual_mass_stride=0,
        vocab_num_blocks=3,
        PADDED_VOCAB_NUM_BLOCKS=4,
        HAS_DRAFT_LOGITS=draft is not None,
        SYNTHETIC_MODE=synthetic,
        USE_BLOCK_VERIFICATION=False,
    )
    return Launch((b.size,), args)


@case("_resample_kernel")
def resample(rng: np.random.Generator) -> Launch:
    b, vocab, block = Batch(rng), int(rng.choice([50, 90])), 64
    target, draft = two_models(rng, b, vocab)
    rejected = rng.integers(0, b.drafts + 1)
    at = torch.from_numpy(b.logit_starts[:-1] + rejected).long()
    target_lse, draft_lse = target[at, :vocab].float().logsumexp(-1), torch.zeros(b.size)
    if draft is not None:
        slots = torch.from_numpy(b.slots)
        scale = torch.from_numpy(np.maximum(b.temperatures[b.slots], np.float32(1e-3)))
        proposed = draft[slots, torch.from_numpy(rejected).clamp(max=b.steps - 1)].float() / scale[:, None]
        draft_lse = proposed.logsumexp(-1)
    fp64, blocks = bool(rng.random() < 0.3), triton.cdiv(vocab, block)
    args = dict(
        resampled_local_argmax_ptr=poison(b.size, blocks, dtype=torch.int64),
        resampled_local_argmax_stride=blocks,
        resampled_local_max_ptr=poison(b.size, blocks, dtype=torch.float64 if fp64 else torch.float32),
        resampled_local_max_stride=blocks,
        target_logits_ptr=target,
        target_logits_stride=target.stride(0),
        target_rejected_logsumexp_ptr=target_lse,
        draft_logits_ptr=draft,
        draft_logits_stride_0=0 if draft is None else draft.stride(0),
        draft_logits_stride_1=0 if draft is None else draft.stride(1),
        draft_rejected_logsumexp_ptr=draft_lse,
        rejected_step_ptr=to(rejected, torch.int32),
        cu_num_logits_ptr=to(b.logit_starts),
        expanded_idx_mapping_ptr=to(b.expanded),
        draft_sampled_ptr=to(rng.integers(-1, vocab, b.logits), torch.int32),
        temp_ptr=to(b.temperatures),
        seed_ptr=to(b.seeds),
        pos_ptr=to(rng.integers(0, 9999, b.logits)),
        cumulative_log_p_ptr=None,
        contexts_ptr=None,
        contexts_stride=0,
        watermarking_ptr=None,
        watermarking_skip_mask_ptr=None,
        watermark_key_0=0,
        watermark_key_1=0,
        vocab_size=vocab,
        BLOCK_SIZE=block,
        HAS_DRAFT_LOGITS=draft is not None,
        USE_FP64=fp64,
        USE_BLOCK_VERIFICATION=False,
        CONTEXT_WIDTH=1,
        WATERMARK=False,
        DEDUPLICATE_CONTEXTS=False,
    )
    # Only then is there a logarithm of a sum, for which the kernel's library function cannot be interpreted.
    close = () if draft is None else ("resampled_local_max_ptr",)
    return Launch((b.size, blocks), args, close=close)


@case("_insert_resampled_kernel")
def insert_resampled(rng: np.random.Generator) -> Launch:
    b, blocks = Batch(rng), 3
    best = rng.normal(size=(b.size, blocks)).astype(np.float32)
    best[rng.random(best.shape) < 0.2] = float("nan")
    args = dict(
        sampled_ptr=poison(b.size, b.steps + 1, dtype=torch.int64),
        sampled_stride=b.steps + 1,
        num_sampled_ptr=to(rng.integers(0, b.drafts + 1), torch.int32),
        resampled_local_argmax_ptr=ints(rng, b.size, blocks, dtype=torch.int64),
        resampled_local_argmax_stride=blocks,
        resampled_local_max_ptr=to(best),
        resampled_local_max_stride=blocks,
        resample_num_blocks=blocks,
        cu_num_logits_ptr=to(b.logit_starts),
        expanded_idx_mapping_ptr=to(b.expanded),
        temp_ptr=to(b.temperatures),
        PADDED_RESAMPLE_NUM_BLOCKS=4,
    )
    return Launch((b.size,), args)


# Sampling -------------------------------------------------------------------------------------------------------------


def gumbel_launch(rng: np.random.Generator, tokens: int, vocab: int, block: int) -> Launch:
    dtype = (torch.float32, torch.bfloat16)[rng.integers(2)]
    logits, source = some_logits(rng, tokens, vocab, dtype), some_logits(rng, tokens, vocab, dtype)
    blocks, fp64, per_token = triton.cdiv(vocab, block), bool(rng.random() < 0.3), bool(rng.random() < 0.5)
    cached = tokens <= SLOTS and rng.random() < 0.6
    slots = rng.permutation(SLOTS)[:tokens] if cached else rng.integers(0, SLOTS, tokens)
    cache = poison(SLOTS, 3, vocab + 2, dtype=dtype) if cached else None
    temperatures = np.where(rng.random(SLOTS) < 0.2, 0.0, rng.uniform(0.2, 1.5, SLOTS))
    args = dict(
        local_argmax_ptr=poison(tokens, blocks, dtype=torch.int64),
        local_argmax_stride=blocks,
        local_max_ptr=poison(tokens, blocks, dtype=torch.float64 if fp64 else torch.float32),
        local_max_stride=blocks,
        logits_cache_ptr=cache,
        logits_cache_stride_0=0 if cache is None else cache.stride(0),
        logits_cache_stride_1=0 if cache is None else cache.stride(1),
        logits_cache_col_ptr=to(rng.integers(0, 3, tokens) if per_token else 1, torch.int64),
        logits_cache_source_ptr=source if cached else None,
        logits_cache_source_stride=source.stride(0) if cached else 0,
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        expanded_idx_mapping_ptr=to(np.where(rng.random(tokens) < 0.1, -1, slots), torch.int64),
        seeds_ptr=to(rng.integers(-(2**63), 2**63 - 1, SLOTS)),
        pos_ptr=to(rng.integers(0, 99999, tokens)),
        temp_ptr=to(temperatures, torch.float32),
        vocab_size=vocab,
        BLOCK_SIZE=block,
        IS_DRAFTING=bool(rng.random() < 0.5),
        APPLY_TEMPERATURE=bool(rng.random() < 0.5),
        USE_FP64=fp64,
        PER_TOKEN_COL=per_token,
    )
    return Launch((tokens, blocks), args)


@case("_gumbel_sample_kernel")
def gumbel(rng: np.random.Generator) -> Launch:
    return gumbel_launch(rng, int(rng.integers(1, 9)), int(rng.choice([50, 90])), 64)


@case("_temperature_kernel")
def temperature(rng: np.random.Generator) -> Launch:
    b, vocab = Batch(rng), 90
    logits = some_logits(rng, b.logits, vocab)
    temperatures = np.where(rng.random(SLOTS) < 0.3, 1.0, b.temperatures)
    args = dict(
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        expanded_idx_mapping_ptr=to(b.expanded),
        temperature_ptr=to(temperatures, torch.float32),
        vocab_size=vocab,
        BLOCK_SIZE=64,
    )
    return Launch((b.logits, 2), args)


@case("_min_p_kernel")
def min_p(rng: np.random.Generator) -> Launch:
    b, vocab = Batch(rng, steps=2), 90
    logits = some_logits(rng, b.logits, vocab)
    args = dict(
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        expanded_idx_mapping_ptr=to(b.expanded),
        min_p_ptr=to(np.where(rng.random(SLOTS) < 0.4, 0.0, rng.random(SLOTS)), torch.float32),
        vocab_size=vocab,
        BLOCK_SIZE=64,
    )
    return Launch((b.logits,), args)


@case("_penalties_kernel")
def penalties(rng: np.random.Generator) -> Launch:
    b, vocab = Batch(rng), 90
    logits = some_logits(rng, b.logits, vocab)

    def penalty(neutral: float) -> torch.Tensor:
        return to(np.where(rng.random(SLOTS) < 0.4, neutral, rng.uniform(0.2, 1.9, SLOTS)), torch.float32)

    counts = to(rng.integers(0, 4, (SLOTS, vocab)) * (rng.random((SLOTS, vocab)) < 0.3), torch.int32)
    args = dict(
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        expanded_idx_mapping_ptr=to(b.expanded),
        token_ids_ptr=to(rng.integers(-1, vocab, b.logits), torch.int32),
        expanded_local_pos_ptr=to(b.local),
        repetition_penalty_ptr=penalty(1.0),
        frequency_penalty_ptr=penalty(0.0),
        presence_penalty_ptr=penalty(0.0),
        prompt_bin_mask_ptr=to(rng.integers(-(2**31), 2**31, (SLOTS, 3)), torch.int32),
        prompt_bin_mask_stride=3,
        output_bin_counts_ptr=counts,
        output_bin_counts_stride=vocab,
        vocab_size=vocab,
        BLOCK_SIZE=64,
    )
    return Launch((b.logits, 2), args)


@case("_bias_kernel")
def bias(rng: np.random.Generator) -> Launch:
    b, vocab, room = Batch(rng, steps=2), 90, 16
    logits = some_logits(rng, b.logits, vocab)

    def count() -> torch.Tensor:
        return to(rng.integers(1, room + 1, SLOTS) * (rng.random(SLOTS) < 0.6), torch.int32)

    def listed() -> torch.Tensor:
        return to(np.stack([rng.permutation(vocab)[:room] for _ in range(SLOTS)]), torch.int32)

    stop = listed()
    allowed = torch.where(torch.rand(SLOTS, 1, generator=torch.Generator().manual_seed(room)) < 0.5, stop, listed())
    args = dict(
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        vocab_size=vocab,
        expanded_idx_mapping_ptr=to(b.expanded),
        num_allowed_token_ids_ptr=count(),
        allowed_token_ids_ptr=allowed,
        allowed_token_ids_stride=room,
        num_logit_bias_ptr=count(),
        bias_token_ids_ptr=listed(),
        bias_token_ids_stride=room,
        bias_ptr=to(rng.normal(size=(SLOTS, room)), torch.float32),
        bias_stride=room,
        pos_ptr=to(rng.integers(0, 9, b.logits)),
        min_lens_ptr=ints(rng, SLOTS, high=20),
        num_stop_token_ids_ptr=count(),
        restore_when_all_masked_ptr=to(rng.integers(0, 2, SLOTS), torch.int32),
        stop_token_ids_ptr=stop,
        stop_token_ids_stride=room,
        BLOCK_SIZE=room,
        LOGITS_BLOCK_SIZE=64,
        CHECK_ALL_MASKED_ROWS=bool(rng.random() < 0.7),
    )
    return Launch((b.logits,), args)


@case("_bad_words_kernel")
def bad_words(rng: np.random.Generator) -> Launch:
    b, vocab, room = Batch(rng), 3, 5  # so few tokens that prefixes match
    logits = some_logits(rng, b.logits, vocab)
    offsets = np.concatenate((np.zeros((SLOTS, 1)), np.cumsum(rng.integers(1, 5, (SLOTS, room)), axis=1)), axis=1)
    prompt_lens = rng.integers(1, 6, SLOTS)
    args = dict(
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        expanded_idx_mapping_ptr=to(b.expanded),
        bad_word_token_ids_ptr=to(rng.integers(0, vocab, (SLOTS, room * 4)), torch.int32),
        bad_word_token_ids_stride=room * 4,
        bad_word_offsets_ptr=to(offsets, torch.int32),
        bad_word_offsets_stride=room + 1,
        num_bad_words_ptr=to(rng.integers(0, room + 1, SLOTS), torch.int32),
        all_token_ids_ptr=to(rng.integers(0, vocab, (SLOTS, WIDTH)), torch.int32),
        all_token_ids_stride=WIDTH,
        prompt_len_ptr=to(prompt_lens, torch.int32),
        total_len_ptr=to(prompt_lens + rng.integers(0, 5, SLOTS), torch.int32),
        input_ids_ptr=to(rng.integers(0, vocab, b.logits), torch.int32),
        expanded_local_pos_ptr=to(b.local),
    )
    return Launch((b.logits, room), args)


@case("_apply_grammar_bitmask_kernel")
def grammar_bitmask(rng: np.random.Generator) -> Launch:
    b, vocab, stride = Batch(rng), 90, 8
    dtype = (torch.float32, torch.bfloat16)[rng.integers(2)]
    logits = some_logits(rng, b.logits, vocab, dtype)
    places = [r * stride + p for r in range(b.size) if rng.random() < 0.7 for p in range(b.steps + 1)] or [0]
    args = dict(
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        logits_indices_ptr=to(places, torch.int32),
        cu_num_logits_ptr=to(b.logit_starts),
        bitmask_ptr=to(rng.integers(-(2**31), 2**31, (len(places), 3)), torch.int32),
        bitmask_stride=3,
        vocab_size=vocab,
        MASK_STRIDE=stride,
        BLOCK_SIZE=64,
    )
    return Launch((len(places), 2), args)


@case("_topk_log_softmax_kernel")
def topk_log_softmax(rng: np.random.Generator) -> Launch:
    rows, vocab, columns = int(rng.integers(1, 9)), 90, int(rng.integers(1, 12))
    logits = some_logits(rng, rows, vocab, (torch.float32, torch.bfloat16)[rng.integers(2)])
    logits[:, 3] = 1.0  # a row masked whole has no probabilities
    args = dict(
        output_ptr=poison(rows, columns, dtype=torch.float32),
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        topk_ids_ptr=ints(rng, rows, columns, high=vocab, dtype=torch.int64),
        topk_ids_stride=columns,
        topk=columns,
        vocab_size=vocab,
        BLOCK_SIZE=64,
        TOPK_BLOCK_SIZE=4,
    )
    return Launch((rows,), args, close=("output_ptr",))


@case("_ranks_kernel")
def ranks(rng: np.random.Generator) -> Launch:
    rows, vocab = int(rng.integers(1, 9)), 90
    logits = some_logits(rng, rows, vocab)
    args = dict(
        output_ptr=poison(rows, dtype=torch.int64),
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        token_ids_ptr=ints(rng, rows, high=vocab, dtype=torch.int64),
        vocab_size=vocab,
        BLOCK_SIZE=64,
    )
    return Launch((rows,), args)


# The tests ------------------------------------------------------------------------------------------------------------


@triton.jit
def log1p_in_double(x):  # noqa: ANN001, ANN201
    return tl.log(1.0 + x.to(tl.float64)).to(tl.float32)


@pytest.fixture(autouse=True)
def log1p(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cannot call the device library's function, and so cannot run the kernel that does."""
    module = sys.modules[SEAMS["_resample_kernel"].resolve().fn.__module__]
    monkeypatch.setattr(module, "tldevice", SimpleNamespace(log1p=log1p_in_double))


RUNS = [(kernel, build) for kernel, builds in CASES.items() for build in builds]


@pytest.mark.parametrize("seeds", [range(0, 10), range(10, 20)], ids=["first", "second"])
@pytest.mark.parametrize(("kernel", "build"), RUNS, ids=[build.__name__ for _, build in RUNS])
def test_memory_is_the_kernels(kernel: str, build: Case, seeds: range) -> None:
    for seed in seeds:
        assert_same(kernel, build, seed)


def test_every_replacement_is_compared() -> None:
    assert set(CASES) | {"_topk_topp_kernel"} == set(OURS)


@pytest.mark.parametrize(
    ("count", "mode"),
    [
        (1000, dict(USE_FP64=False, IS_DRAFTING=False, APPLY_TEMPERATURE=False)),
        (250, dict(USE_FP64=False, IS_DRAFTING=True, APPLY_TEMPERATURE=True)),
        (250, dict(USE_FP64=True, IS_DRAFTING=False, APPLY_TEMPERATURE=False)),
    ],
    ids=["target", "drafter", "float64"],
)
def test_many_tokens_are_sampled_the_same(count: int, mode: dict[str, bool]) -> None:
    def build(rng: np.random.Generator) -> Launch:
        made = gumbel_launch(rng, count, 320, 1024)
        maximum = made.args["local_max_ptr"].to(torch.float64 if mode["USE_FP64"] else torch.float32)
        return Launch(made.grid, made.args | mode | {"local_max_ptr": maximum})

    want = assert_same("_gumbel_sample_kernel", build, seed=count)
    assert len(want.args["local_argmax_ptr"].unique()) > 80


@triton.jit
def draw(out, seeds, offsets, count: tl.constexpr):  # noqa: ANN001, ANN201
    i = tl.arange(0, count)
    tl.store(out + i, tl.maximum(tl.rand(tl.load(seeds + i), tl.load(offsets + i)), 4.6566127342e-10))


@pytest.mark.parametrize("high", [2**20, 2**31, 2**40])
def test_uniform_numbers_are_tritons(high: int) -> None:
    rng, count = np.random.default_rng(high), 4096
    seeds, offsets = rng.integers(-(2**63), 2**63 - 1, count), rng.integers(0, high, count)
    want = poison(count, dtype=torch.float32)
    draw[(1,)](want, torch.from_numpy(seeds), torch.from_numpy(offsets), count)
    assert torch.equal(torch.from_numpy(noise.philox_uniform(seeds, offsets)), want)


def test_ranks_in_bfloat16() -> None:
    """The interpreter cannot say: it compares bfloat16 by its bits, in which negative numbers are the larger."""
    args = ranks(np.random.default_rng(1)).args
    args["logits_ptr"] = args["logits_ptr"].bfloat16()
    outputs = []
    for logits in (args["logits_ptr"], args["logits_ptr"].float()):
        OURS["_ranks_kernel"](**args | {"logits_ptr": logits})
        outputs.append(args["output_ptr"].clone())
    assert torch.equal(*outputs)


def cut(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Launch the replacement as vLLM's sampler does."""
    rows, vocab = logits.shape
    OURS["_topk_topp_kernel"](
        LOGITS=logits,
        LOGITS_STRIDE_0=logits.stride(0),
        BUFFER=None,
        PERCENTILE_TO_STD_TABLE=None,
        NORMAL_CDF_TO_SIGMA_TABLE=None,
        K=logits if k is None else k,
        P=logits if p is None else p,
        BATCH_SIZE=rows,
        VOCAB_SIZE=vocab,
        MASK_VALUE=-INF,
        BLOCK_SIZE=256,
        BLOCK_SIZE_TRUNC=128,
        TOPK_ENABLED=k is not None,
        TOPP_ENABLED=p is not None,
        SPLIT_COVERS_PONLY=False,
        num_warps=4,
    )
    return logits


REFERENCE = Seam(
    target="vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p_pytorch",
    signature=("logits", "k", "p", "allow_cpu_sync"),
    why="compare top-k and top-p, whose kernel the interpreter cannot run",
    drop_when="the interpreter runs it",
)


@pytest.mark.parametrize("which", ["k", "p", "kp"])
def test_top_k_and_top_p_are_vllms_torch_version(which: str) -> None:
    random = torch.Generator().manual_seed(len(which))
    logits = torch.randn(200, 90, generator=random) * 3
    logits[::3] = logits[::3].masked_fill(torch.rand(67, 90, generator=random) < 0.5, -INF)
    k = torch.randint(1, 91, (200,), generator=random, dtype=torch.int32) if "k" in which else None
    p = torch.rand(200, generator=random) if "p" in which else None
    if p is not None:
        p[::5] = 1.0
    want = REFERENCE.resolve()(logits.clone(), k, p)
    assert torch.equal(cut(logits.clone(), k, p), want)


def test_of_equal_logits_the_first_stay() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert cut(logits, torch.tensor([2], dtype=torch.int32), None).isfinite().tolist() == [
        [False, True, True, False, False]
    ]


@pytest.mark.parametrize(
    ("kernel", "changed", "says"),
    [
        ("_compute_slot_mappings_kernel", {"CP_SIZE": 2}, "Context parallelism"),
        ("_prepare_dflash_inputs_kernel", {"CP_SIZE": 2}, "Context parallelism"),
        ("_rejection_kernel", {"USE_BLOCK_VERIFICATION": True}, "Block verification"),
        ("_resample_kernel", {"WATERMARK": True}, "watermarking"),
    ],
)
def test_what_is_not_replaced_is_refused(kernel: str, changed: dict[str, Any], says: str) -> None:
    args = CASES[kernel][0](np.random.default_rng(0)).args
    with pytest.raises(ConfigError, match=says):
        OURS[kernel](**args | changed)


@pytest.mark.parametrize("seam", runner_kernels.SEAMS, ids=lambda seam: seam.target.split(":")[1])
def test_replacement_has_the_kernels_parameters(seam: Seam) -> None:
    assert seam.problem() is None
    assert tuple(seam.resolve().arg_names) == seam.signature  # so vLLM passes the arguments by name


ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.triton_utils.dispatcher import KernelOverride
from vllm.v1.worker.gpu import input_batch
target, drafter, kernels = sys.argv[1:]
speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": 7}
engine = LLM(target, max_model_len=256, max_num_seqs=3, enforce_eager=True, kv_cache_memory_bytes=1 << 27,
             speculative_config=speculative, additional_config={"thor_spec": {"runner_kernels": kernels}})
prompts = ["def add(a, b):", "The", "for i in range("]
chosen = [dict(temperature=0.0), dict(temperature=0.8, seed=7), dict(temperature=0.8, seed=8, repetition_penalty=1.2)]
params = [SamplingParams(max_tokens=10, ignore_eos=True, logprobs=2, **c) for c in chosen]
tokens = [o.outputs[0].token_ids for o in engine.generate(prompts, params, use_tqdm=False)]
overridden = isinstance(input_batch._post_update_kernel, KernelOverride)
print(json.dumps({"tokens": [list(t) for t in tokens], "overridden": overridden}))
"""


def test_the_engine_says_the_same(tmp_path: Path) -> None:
    from thor_spec.nano import checkpoints

    target = checkpoints.ensure("tiny-hybrid")
    drafter = checkpoints.ensure(checkpoints.PAIRS["tiny-hybrid"])
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    settings = {
        "VLLM_PLUGINS": "thor_spec",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }

    def say(kernels: str) -> dict[str, Any]:
        command = [sys.executable, str(script), str(target), str(drafter), kernels]
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(json.loads(done.stdout.splitlines()[-1]))

    with ThreadPoolExecutor(2) as pool:
        triton_says, torch_says = pool.map(say, ("triton", "torch"))
    assert not triton_says["overridden"]
    assert torch_says["overridden"]
    assert torch_says["tokens"] == triton_says["tokens"]
