"""How vLLM cuts its cache into blocks, so that its own "GPU KV cache size" comes out.

Every layer's block has the same bytes. A Gated-DeltaNet layer's block is one state, so the attention layers' block gets
as many tokens as fill the bytes of a state, rounded up to 16; states are padded to that. Layers of one kind are cut
into groups of equally many layers, and a block of the pool serves one group.

Source: vLLM 0.33, platforms/interface.py (block size) and v1/core/kv_cache_planning.py (groups); 0.32 agrees.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thor_spec.capacity.shape import DTYPE_BYTES, Attention, ModelShape

StateKind = Literal["snapshot", "reconstruct"]

KERNEL_BLOCK_TOKENS = 16
PADDING_LIMIT = 1.5  # vLLM pads a kind with few more layers rather than splitting it


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share a block table. ``block_tokens`` is None where a block is one state."""

    layers: int
    block_tokens: int | None
    states: int = 0


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
        return sum(g.states if g.block_tokens is None else math.ceil(context / g.block_tokens) for g in self.groups)

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
) -> BlockLayout:
    """Return the layout of the target's cache, with the drafter's beside it."""
    kv_bytes = DTYPE_BYTES[kv_dtype]
    token_bytes = target.attention.bytes_per_token(kv_bytes)
    tokens, state_bytes, delta = kernel_block_tokens, 0, target.delta_net
    if delta:
        columns = drafts if kind == "snapshot" else 0
        state_bytes = delta.state_bytes(DTYPE_BYTES[state_dtype]) + delta.conv_bytes(target.element_bytes, columns)
        tokens = kernel_block_tokens * math.ceil(state_bytes / (kernel_block_tokens * token_bytes))
    kinds = [(target.attention, tokens * token_bytes)]
    if drafter:
        kinds.append((drafter.attention, tokens * drafter.attention.bytes_per_token(kv_bytes)))
    page = max(bytes_ for _, bytes_ in kinds)
    groups = [_Kind(a.layers, _unified(tokens, bytes_, page), 0) for a, bytes_ in _merged(kinds)]
    if delta:
        states = states_per_sequence(kind, drafts, prefix_caching=prefix_caching)
        groups.append(_Kind(delta.layers, None, states))
    size = _group_layers([kind_.layers for kind_ in groups])
    return BlockLayout(
        page_bytes=page,
        group_layers=size,
        groups=tuple(
            Group(layers=size, block_tokens=kind_.block_tokens, states=kind_.states)
            for kind_ in groups
            for _ in range(math.ceil(kind_.layers / size))
        ),
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    layers: int
    block_tokens: int | None
    states: int


def _merged(kinds: Sequence[tuple[Attention, int]]) -> list[tuple[Attention, int]]:
    """Put a drafter's layers with the target's where both have the same heads: one kind then."""
    (first, page), *rest = kinds
    if rest and (rest[0][0].kv_heads, rest[0][0].head_dim) == (first.kv_heads, first.head_dim):
        layers = first.layers + rest[0][0].layers
        return [(_with_layers(first, layers), page)]
    return list(kinds)


def _with_layers(attention: Attention, layers: int) -> Attention:
    return Attention(
        layers=layers,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        gated=attention.gated,
    )


def _unified(tokens: int, bytes_: int, page: int) -> int:
    """Return the tokens of a block that must have ``page`` bytes: more where that divides, else padding."""
    return tokens * (page // bytes_) if page % bytes_ == 0 else tokens


def _group_layers(counts: Sequence[int]) -> int:
    least, most = min(counts), max(counts)
    return most if most < least * PADDING_LIMIT else least
