"""Blocks of a drafter that slides: what it may see has one, and no more are held than were planned.

A request is driven as vLLM's scheduler does: prompts in chunks, steps of drafts of which some are rejected, up to two
steps under way.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import get_manager_for_kv_cache_spec
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from thor_spec.vllm_plugin.drafter_tail import TILE, TailManager, TailSpec, tail_of

CONTEXT = 4096


def made(window: int, drafts: int, batches: int, block: int) -> tuple[Any, Any]:
    """Return a manager as vLLM builds it, and the pool."""
    plain = SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=window
    )
    config = SimpleNamespace(max_concurrent_batches=batches, num_speculative_tokens=drafts)
    spec = tail_of(plain, config)
    pool = BlockPool(num_gpu_blocks=CONTEXT // block + 2, enable_caching=False, hash_block_size=block)
    manager = get_manager_for_kv_cache_spec(
        spec, max_in_flight_tokens=2 * CONTEXT, max_model_len=CONTEXT, block_pool=pool, enable_caching=False,
        kv_cache_group_id=0, scheduler_block_size=block,
    )  # fmt: skip
    assert isinstance(manager, TailManager)
    return manager, pool


class Request:
    """One request, as the scheduler counts it; ``worker`` is the block table that steps run with."""

    def __init__(self, manager: Any, pool: Any, window: int, drafts: int) -> None:
        self.manager, self.pool, self.window, self.drafts = manager, pool, window, drafts
        self.settled = self.scheduled = self.prompt = 0
        self.under_way: list[tuple[int, int]] = []  # scheduled before the step, tokens of it
        self.worker: list[int] = []
        self.most = 0

    def step(self, tokens: int, *, prompt: bool = False) -> None:
        """Schedule a step of ``tokens``, and check what the drafter sees behind it."""
        end = self.scheduled + tokens
        need = min(end + self.drafts, CONTEXT)
        self.manager.remove_skipped_blocks("r", self.settled)
        free = self.pool.get_num_free_blocks()
        asked = self.manager.get_num_blocks_to_allocate("r", need, [], self.scheduled, self.scheduled, end)
        new = self.manager.allocate_new_blocks("r", need, end)
        assert free - self.pool.get_num_free_blocks() <= asked <= free
        self.worker += [block.block_id for block in new]
        held = self.manager.req_to_blocks["r"]
        assert len(held) == len(self.worker)
        self.most = max(self.most, sum(not block.is_null for block in held))
        self.under_way.append((self.scheduled, tokens))
        self.scheduled = end
        self.prompt += tokens if prompt else 0
        earliest = end if prompt else min(end, max(self.settled, self.prompt) + 1)  # all drafts may be rejected
        seen = range(max(earliest - self.window + 1 - (TILE - 1), 0), need)  # a tile's keys are loaded, and masked
        for position in seen:
            block = held[position // self.manager.block_size]
            assert not block.is_null, (position, end)
            assert block.block_id == self.worker[position // self.manager.block_size]

    def settle(self, accepted: int) -> None:
        """Learn what became of the oldest step; later ones were scheduled as if all had been accepted."""
        before, tokens = self.under_way.pop(0)
        lost = tokens - accepted
        self.scheduled -= lost
        self.under_way = [(start - lost, count) for start, count in self.under_way]
        self.settled = before + accepted


@pytest.mark.parametrize("seed", range(60))
def test_what_is_seen_is_kept_and_no_more_is_held(seed: int) -> None:
    rng = random.Random(seed)
    drafts, batches, block = rng.choice((3, 7, 15, 63)), rng.choice((1, 2)), rng.choice((16, 32, 80))
    window = rng.choice((32, 100, 512))
    manager, pool = made(window, drafts, batches, block)
    free = pool.get_num_free_blocks()
    request = Request(manager, pool, window, drafts)
    prompt = rng.randint(1, 3000)
    while request.scheduled < prompt:
        if len(request.under_way) == batches:
            request.settle(request.under_way[0][1])
        request.step(min(rng.choice((1, 60, 700, 2048)), prompt - request.scheduled), prompt=True)
    while request.scheduled + drafts + 1 < min(prompt + 900, CONTEXT - drafts):
        if len(request.under_way) == batches:
            last = request.under_way[0][1]
            is_prompt = request.under_way[0][0] < prompt
            request.settle(last if is_prompt else rng.randint(1, last))
        request.step(drafts + 1)
    cap = manager.max_admission_blocks_per_request
    assert cap == -(-min(window - 1 + TILE + 2 * batches * (drafts + 1), CONTEXT) // block) + 1
    assert request.most <= cap
    manager.free("r")
    assert pool.get_num_free_blocks() == free


def test_a_prompt_in_one_step_takes_the_tail_s_blocks() -> None:
    manager, pool = made(64, 7, 2, 16)
    free = pool.get_num_free_blocks()
    new = manager.allocate_new_blocks("r", 3007, 3000)
    assert len(new) == 188  # one entry for each block of the table
    kept = [i for i, block in enumerate(new) if not block.is_null]
    assert kept == list(range((3000 - 63 - 16 - TILE) // 16, 188))
    assert free - pool.get_num_free_blocks() == len(kept)
    assert manager.get_num_blocks_to_allocate("q", 3007, [], 0, 0, 3000) == len(kept)
    plain = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=64)
    assert plain.max_admission_blocks_per_request(16384, CONTEXT) == CONTEXT // 16 + 1  # what vLLM plans with


def test_layers_that_see_everything_stay_as_they_are() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    assert tail_of(spec, SimpleNamespace(max_concurrent_batches=2, num_speculative_tokens=7)) is spec


def test_vllm_s_own_kinds_are_registered_too() -> None:
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    assert KVCacheSpecRegistry.get_manager_class(spec) is not None
    assert (
        KVCacheSpecRegistry.get_uniform_type_base_spec(
            TailSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=8)
        )
        is SlidingWindowSpec
    )
