"""Blocks of a drafter whose layers slide: those at the end of a prompt's step, none for what has slid out within it.

A drafter asks once a step, behind the step's last token. Of a prompt's thousands of tokens in one step it will see the
last ``window`` alone, so keys and values of the rest need no place: they are written into vLLM's null block, which
nobody reads. vLLM keeps blocks for all of them until the step has passed, and plans room for that in every sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thor_spec.vllm_plugin import compat

_Spec: Any = compat.WINDOW_SPEC.resolve()
_Manager: Any = compat.WINDOW_MANAGER.resolve()
TILE = 128
"""Keys that an attention kernel loads at once, at most: it may load, and mask, so many less one below the window. What
is given back may be another sequence's state by then, and a masked NaN is still one."""


@dataclass(frozen=True, kw_only=True)
class TailSpec(_Spec):
    """vLLM's sliding window, and what stays readable below it."""

    under_way: int = 0
    """Tokens that may be rejected of steps under way. A field of ours: vLLM writes ``extra_retained_tokens`` itself."""

    @property
    def num_retained_tokens(self) -> int:
        """Return the tokens below a step's first one that stay readable; the worker clears entries below."""
        return int(self.sliding_window - 1 + self.extra_retained_tokens + TILE + self.under_way)

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:  # noqa: ARG002
        """Return the most blocks that a sequence holds at a time, one for a window that begins within a block."""
        held = min(self.num_retained_tokens + self.under_way, max_model_len)  # drafts are fewer than those under way
        return -(-held // int(self.block_size)) + 1


class TailManager(_Manager):
    """vLLM's manager of sliding windows, which passes over what a step leaves behind. Without prefix caching only."""

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],  # noqa: ARG002
        total_computed_tokens: int,  # noqa: ARG002
        num_local_computed_tokens: int,  # noqa: ARG002
        num_tokens_main_model: int,
        *_: Any,
        **__: Any,
    ) -> int:
        """Return how many blocks a step adds, less those that it gives back first."""
        blocks = self.req_to_blocks.get(request_id, ())
        first = self._first(num_tokens_main_model)
        added = -(-num_tokens // int(self.block_size)) - max(len(blocks), first)
        given_back = sum(not block.is_null for block in blocks[:first])
        return max(added - given_back, 0)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        """Return the blocks that the sequence gets: null ones for what will have slid out, then real ones."""
        blocks = self.req_to_blocks[request_id]
        first = self._first(num_tokens_main_model)
        self._remove_blocks_in_range(request_id, 0, first)
        passed = [self._null_block] * (first - len(blocks))
        blocks.extend(passed)
        added: list[Any] = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        return passed + added

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many tokens nobody reads any more."""
        return max(num_computed_tokens - int(self.kv_cache_spec.num_retained_tokens), 0)

    def _first(self, tokens: int) -> int:
        """Return the first block that the drafter may see behind a step that ends at ``tokens``."""
        return self.get_num_skipped_tokens(tokens) // int(self.block_size)


def tail_of(spec: Any, vllm_config: Any) -> Any:
    """Return a drafter's specification with the tail of its window only; one that does not slide stays as it is."""
    if not isinstance(spec, _Spec):
        return spec
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    under_way = vllm_config.max_concurrent_batches * (vllm_config.num_speculative_tokens + 1)
    return TailSpec(**fields, under_way=under_way)


compat.SPEC_REGISTERED.resolve()()  # vLLM's own, which are not registered any more where another one is
compat.SPEC_REGISTER.resolve()(TailSpec, TailManager, _Spec)
