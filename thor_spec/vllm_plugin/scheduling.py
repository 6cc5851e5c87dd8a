"""What vLLM's scheduler gets wrong about prefix caching with drafts, put right; and an account of every lookup.

vLLM 0.32 takes DFlash for EAGLE: a hit loses its last block, and the recurrent state is kept one block too early for
the first repeat of a prompt, which then finds nothing at all. EAGLE's draft cache at a position depends on the token
after it; DFlash's comes from the target's features at that position alone. 0.33 knows the difference.

Where workers are processes of their own, the scheduler's configuration still has the block size of before it was
fitted to the recurrent state, and prompts are cut at multiples of that: no state is kept where a hit could go on.

Both versions enter into the cache what decode steps wrote. A verify step rounds otherwise than a prompt, so a request
that is given such a block does not get the bits that it gets without the cache. Recurrent states of answers are not
kept (retention 0); but attention blocks are, and a later request at the same place adds a state to them.
"""

from collections.abc import Callable
from typing import Any

from packaging.version import Version

from thor_spec.vllm_plugin import compat, drafting
from thor_spec.vllm_plugin.reuse import Account

MENDED_IN = Version("0.33")
WITHOUT_DROP = ("dflash", "dspark")
"""Methods whose draft cache at a position needs nothing behind it."""


def install(vllm: str) -> None:
    """Put the mends into vLLM's classes, as far as version ``vllm`` needs them. Safe to call again."""
    compat.RECORD_LOOKUP.wrap(accounted)
    compat.ENTER_BLOCKS.wrap(prompts_only)
    compat.ALIGNED_SPLIT.wrap(at_blocks)
    compat.SCHEDULE.wrap(drafting.chosen)
    compat.UPDATE_FROM_OUTPUT.wrap(drafting.observed)
    if Version(vllm) < MENDED_IN:
        compat.BLOCK_DROP.wrap(without_drop)


def without_drop(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``SpeculativeConfig.use_eagle_block_drop``, false for drafters that need none."""

    def use_eagle_block_drop(self: Any) -> bool:
        return self.method not in WITHOUT_DROP and bool(stock(self))

    return use_eagle_block_drop


def at_blocks(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Scheduler._mamba_block_aligned_split``, which goes by the blocks that the cache really has."""

    def split(self: Any, *args: Any, **kwargs: Any) -> Any:
        configured, self.cache_config.block_size = self.cache_config.block_size, self.block_size
        try:
            return stock(self, *args, **kwargs)
        finally:
            self.cache_config.block_size = configured

    return split


def prompts_only(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``KVCacheCoordinator.cache_blocks``, which leaves a hybrid's answers out where their states are."""

    def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> None:
        if (applies := vars(self).get("thor_spec_prompts_only")) is None:  # asked for every request in every step
            applies = self.kv_cache_config.has_mamba_layers and self.retention_interval == 0
            self.thor_spec_prompts_only = applies
        if applies:
            num_computed_tokens = min(num_computed_tokens, request.num_prompt_tokens)
        stock(self, request, num_computed_tokens)

    return cache_blocks


def accounted(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``KVCacheManager.record_prefix_cache_stats``, which tells our account as well."""

    def record(self: Any, request: Any, num_hits: int) -> None:
        stock(self, request, num_hits)
        if not self.prefix_cache_lookup_enabled(request) or request.num_preemptions:
            return
        if not hasattr(self, "thor_spec_account"):
            self.thor_spec_account = Account.open()
        self.thor_spec_account.add(
            hashes=request.block_hashes,
            block=self.coordinator.scheduler_block_size,
            hashed=self.block_pool.hash_block_size,
            tokens=request.num_tokens,
            reused=num_hits,
            stateless=request.shared_prefix_boundary > num_hits,
        )

    return record
