"""Scheduling in whole blocks: chunks of a prompt end where blocks end, and a block is scheduled whole or not at all."""

from typing import Any

from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import compat

_Sync: Any = compat.DIFFUSION_SCHEDULER.resolve()
_Async: Any = compat.DIFFUSION_ASYNC_SCHEDULER.resolve()


class _InBlocks:
    """Before vLLM's scheduler in the order of resolution."""

    num_spec_tokens: int
    max_model_len: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.need_mamba_block_aligned_split = True  # the scheduler then asks below how much of a request may run
        self.block = self.num_spec_tokens
        self.context = self.max_model_len
        if self.context % self.block:
            raise ConfigError(
                f"The context of {self.context} tokens is no multiple of the block of {self.block}. "
                f"Take {self.context // self.block * self.block}: --context."
            )
        # In its first block a request counts as ``block`` tokens behind its prompt, though the prompt's end is among
        # them. The limit is therefore ours to keep; add_request keeps vLLM's check of lengths right.
        self.max_model_len = self.context + self.block

    def add_request(self, request: Any) -> None:
        request.max_tokens = min(request.max_tokens, self.context - request.num_prompt_tokens)
        super().add_request(request)  # type: ignore[misc]

    def _mamba_block_aligned_split(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Return how many tokens of ``request`` run in this step; 0 leaves it for a later one."""
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        if start < request.num_tokens:  # its prompt, or a resumed request's tokens
            end = start + num_new_tokens
            if end < request.num_tokens:
                end = end // self.block * self.block
            return int(max(end - start, 0))
        # ``start`` counts blocks that are under way as well: beyond the last one there is nothing to compute.
        is_beyond = start // self.block * self.block + self.block > self.context
        return 0 if num_new_tokens < self.block or is_beyond else self.block


class BlockScheduler(_InBlocks, _Sync):
    """Without overlap of scheduling and steps."""


class BlockAsyncScheduler(_InBlocks, _Async):
    """Schedules a step while the one before it runs."""


def block_scheduler(vllm_config: Any, **kwargs: Any) -> Any:
    """Return the scheduler; which one is known only after vLLM asked for its class."""
    chosen = BlockAsyncScheduler if vllm_config.scheduler_config.async_scheduling else BlockScheduler
    return chosen(vllm_config=vllm_config, **kwargs)
