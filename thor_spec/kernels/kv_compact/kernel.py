"""Compaction in Triton: all buffers of all layers in one launch, through a table of their addresses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from thor_spec.errors import ConfigError

BLOCK = 512
_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # entries move as bits, whatever they mean


@triton.jit
def _kv_compact(addresses, slots, cu_nodes, path, accepted, PATH_STRIDE: tl.constexpr, BITS: tl.constexpr,
                BLOCK_STRIDE: tl.constexpr, SLOT_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, SLOTS: tl.constexpr,
                D: tl.constexpr, ENTRY: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    i_r = tl.program_id(1)
    first = tl.load(cu_nodes + i_r).to(tl.int64)
    buffer = tl.load(addresses + tl.program_id(2)).to(tl.pointer_type(BITS))
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < ENTRY
    column = (at // D).to(tl.int64) * HEAD_STRIDE + at % D
    # In order of depth, without a barrier: every thread moves its own columns, and a node is never above its own depth,
    # so a slot is written only after it was read.
    for depth in range(tl.load(accepted + i_r).to(tl.int32)):
        node = tl.load(path + i_r * PATH_STRIDE + depth).to(tl.int64)
        target = tl.load(slots + first + depth).to(tl.int64)
        source = tl.load(slots + first + node).to(tl.int64)
        moves = inside & (node != depth) & (target >= 0) & (source >= 0)
        p_source = buffer + source // SLOTS * BLOCK_STRIDE + source % SLOTS * SLOT_STRIDE + column
        p_target = buffer + target // SLOTS * BLOCK_STRIDE + target % SLOTS * SLOT_STRIDE + column
        tl.store(p_target, tl.load(p_source, mask=moves, other=0), mask=moves)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Key and value caches of equal layout, and the table of their addresses that a captured launch reads."""

    tensors: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    """[L], int64, on the buffers' device."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Self:
        """Collect buffers [B, S, HKV, D]. Raises: ConfigError, if they differ in layout or there is none."""
        kinds = {(t.shape[1:], t.stride(), t.dtype, t.device) for t in tensors}
        if len(kinds) != 1 or any(t.dim() != 4 or t.stride(3) != 1 for t in tensors):
            raise ConfigError(
                "kv_compact moves buffers [blocks, slots, heads, dim] of one layout in one launch; these have "
                f"{len(kinds)}. Make one table per layout."
            )
        addresses = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64)
        return cls(tuple(tensors), addresses.to(tensors[0].device))


def kv_compact(
    buffers: Buffers, slots: torch.Tensor, cu_nodes: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor
) -> None:
    """Move accepted entries to the slots of a chain; see ``reference.kv_compact``. ``path`` must rise."""
    if path.stride(1) != 1:
        raise ConfigError("kv_compact: the entries of a path must be adjacent.")
    one = buffers.tensors[0]
    _, size, heads, dim = one.shape
    entry = heads * dim
    block = min(BLOCK, triton.next_power_of_2(entry))
    _kv_compact[(triton.cdiv(entry, block), accepted.numel(), len(buffers.tensors))](
        buffers.addresses, slots, cu_nodes, path, accepted, PATH_STRIDE=path.stride(0),
        BITS=_INTEGERS[one.element_size()], BLOCK_STRIDE=one.stride(0), SLOT_STRIDE=one.stride(1),
        HEAD_STRIDE=one.stride(2), SLOTS=size, D=dim, ENTRY=entry, BLOCK=block, num_warps=4,
    )  # fmt: skip
