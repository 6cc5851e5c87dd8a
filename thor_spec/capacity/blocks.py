"""How vLLM cuts its cache into blocks, so that its own "GPU KV cache size" comes out.

Every layer's block has the same bytes. A Gated-DeltaNet layer's block is one state, so the attention layers' block gets
as many tokens as fill the bytes of a state, rounded up to 16; states are padded to that. Layers of one kind are cut
into groups of equally many layers, and a block of the pool serves one group.

A drafter with wider keys than the target's would have the pool padded to its blocks. With one state per sequence ours
asks for fewer tokens in them instead (``vllm_plugin.drafter_cache``).

Source: vLLM 0.33, platforms/interface.py (block size), v1/core/kv_cache_planning.py (groups) and
v1/kv_cache_interface.py (windows); 0.32 agrees.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thor_spec.capacity.shape import DTYPE_BYTES, Attention, ModelShape

StateKind = Literal["snapshot", "reconstruct"]

KERNEL_BLOCK_TOKENS = 16
TILE_TOKENS = 128  # as vllm_plugin.drafter_tail.TILE
PADDING_LIMIT = 1.5  # vLLM pads a kind with few more layers rather than splitting it


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share a block table. ``block_tokens`` is None where a block is one state."""

    layers: int
    block_tokens: int | None
    states: int = 0
    held_tokens: int | None = None
    """Most tokens of a sequence that are kept at a time; None: all."""

    def blocks(self, context: int) -> int:
        """Return the blocks of a sequence of ``context`` tokens."""
        if self.block_tokens is None:
            return self.states
        if self.held_tokens is None:
            return math.ceil(context / self.block_tokens)
        return math.ceil(min(self.held_tokens, context) / self.block_tokens) + 1  # may begin within a block


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The pool's unit: one block of every layer in a group."""

    page_bytes: int
    group_layers: int
    groups: tuple[Group, ...]

    @property
    def block_bytes(self) -> int:
        """Return what one block of the pool takes."""
        return self.page_bytes * self.group_layers

    def blocks_per_sequence(self, context: int) -> int:
        """Return the blocks of a sequence of ``context`` tokens."""
        return sum(group.blocks(context) for group in self.groups)

    def sequences(self, kv_bytes: int, context: int) -> float:
        """Return how many sequences of ``context`` tokens fit at once, as vLLM reports it."""
        return (max(0, kv_bytes) // self.block_bytes) / self.blocks_per_sequence(context)

    def tokens(self, kv_bytes: int, context: int) -> int:
        """Return vLLM's "KV cache size" in tokens: the sequences above times their context."""
        return int(self.sequences(kv_bytes, context) * context)


def states_per_sequence(kind: StateKind, drafts: int, *, prefix_caching: bool) -> int:
    """Return the state slots that a sequence holds in each Gated-DeltaNet layer.

    A snapshot per drafted token beside the committed state; none of them where the state is reconstructed. With prefix
    caching vLLM keeps one more, at the last block boundary.
    """
    return (2 if prefix_caching else 1) + (drafts if kind == "snapshot" else 0)


def layout(
    target: ModelShape,
    drafter: ModelShape | None,
    *,
    drafts: int,
    kind: StateKind,
    kv_dtype: str,
    state_dtype: str,
    prefix_caching: bool = False,
    kernel_block_tokens: int = KERNEL_BLOCK_TOKENS,
    least_block_tokens: int = KERNEL_BLOCK_TOKENS,
    drafter_window: int | None = None,
    batches: int = 1,
    batched_tokens: int = 0,
) -> BlockLayout:
    """Return the layout of the target's cache, with the drafter's beside it.

    Args:
        kernel_block_tokens: of which the target's blocks are a multiple.
        least_block_tokens: of which the drafter's are, where they are smaller.
        drafter_window: tokens that the drafter attends to; None: as its own layers do.
        batches: steps that are under way at a time.
        batched_tokens: tokens of a step at most; until it has passed, vLLM keeps what slid out of a window within it.
    """
    kv_bytes = DTYPE_BYTES[kv_dtype]
    token_bytes = target.attention.bytes_per_token(kv_bytes)
    tokens, state_bytes, delta = kernel_block_tokens, 0, target.delta_net
    if delta:
        columns = drafts if kind == "snapshot" else 0
        state_bytes = delta.state_bytes(DTYPE_BYTES[state_dtype]) + delta.conv_bytes(target.element_bytes, columns)
        tokens = kernel_block_tokens * math.ceil(state_bytes / (kernel_block_tokens * token_bytes))
    page = tokens * token_bytes
    kinds = [_Kind(target.attention.layers, tokens)]
    if drafter:
        own, own_bytes = tokens, drafter.attention.bytes_per_token(kv_bytes)
        ours = bool(delta) and kind == "reconstruct" and not prefix_caching
        if ours:
            own = _fitted(tokens, own_bytes, page, least_block_tokens)
        wide = max(page, own * own_bytes)
        window = drafter.window if drafter_window is None else drafter_window
        sliding = drafter.sliding_layers if drafter_window is None else drafter.attention.layers
        full, cut = drafter.attention.layers - sliding, _unified(own, own * own_bytes, wide)
        kinds = [_Kind(target.attention.layers, _unified(tokens, page, wide)), _Kind(full, cut)]
        if _alike(target.attention, drafter.attention):
            kinds = [_Kind(target.attention.layers + full, tokens)]
        if window is not None:
            behind = TILE_TOKENS + 2 * batches * (drafts + 1) if ours else batches * batched_tokens
            kinds.append(_Kind(sliding, cut, held_tokens=window - 1 + behind))
        page = wide
    if delta:
        states = states_per_sequence(kind, drafts, prefix_caching=prefix_caching)
        kinds.append(_Kind(delta.layers, None, states=states))
    kinds = [each for each in kinds if each.layers]
    size = _group_layers([each.layers for each in kinds])
    return BlockLayout(
        page_bytes=page,
        group_layers=size,
        groups=tuple(
            Group(layers=size, block_tokens=each.block_tokens, states=each.states, held_tokens=each.held_tokens)
            for each in kinds
            for _ in range(math.ceil(each.layers / size))
        ),
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    layers: int
    block_tokens: int | None
    states: int = 0
    held_tokens: int | None = None


def _alike(target: Attention, drafter: Attention) -> bool:
    """Return whether a drafter's layers are of the target's kind: with the same heads."""
    return (target.kv_heads, target.head_dim) == (drafter.kv_heads, drafter.head_dim)


def _fitted(tokens: int, token_bytes: int, page: int, least: int) -> int:
    """Return the tokens of a drafter's block that has ``page`` bytes, or ``tokens`` where that does not divide."""
    ratio, rest = divmod(tokens * token_bytes, page)
    return tokens // ratio if ratio > 1 and not rest and tokens % (ratio * least) == 0 else tokens


def _unified(tokens: int, bytes_: int, page: int) -> int:
    """Return the tokens of a block that must have ``page`` bytes: more where that divides, else padding."""
    return tokens * (page // bytes_) if page % bytes_ == 0 else tokens


def _group_layers(counts: Sequence[int]) -> int:
    least, most = min(counts), max(counts)
    return most if most < least * PADDING_LIMIT else least
