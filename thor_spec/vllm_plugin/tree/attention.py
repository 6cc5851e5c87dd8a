"""Attention of the target's full-attention layers, where each node sees the context and its own path.

vLLM's implementation of a layer gets a class that knows trees, derived from its own: on a GPU prompts stay vLLM's
business and our kernel takes the verified rows; on a CPU, for tests, everything is done in torch.

Shapes: T tokens of the step, HQ query heads, HKV heads of keys and values, D head dim, B blocks of S slots, R rows.
"""

from typing import Any

import torch

from thor_spec.errors import ConfigError
from thor_spec.kernels.gdn_verify.tiles import processors
from thor_spec.kernels.tree_attention.kernel import tree_attention
from thor_spec.kernels.tree_attention.tiles import Tiles
from thor_spec.vllm_plugin.tree.topology import Topology

KNOWN = ("FLASH_ATTN", "TRITON_ATTN")
"""vLLM's backends whose caches are [B, HKV, S, 2 D], keys before values."""


def split(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [B, S, HKV, D] of a cache [B, HKV, S, 2 D], as views."""
    keys, values = cache.transpose(1, 2).chunk(2, dim=-1)
    return keys, values


class _OnGPU:
    """Stands before vLLM's implementation; vLLM has written the step's keys and values when ``forward`` is called."""

    topology: Topology
    max_slots: int

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        topology = self.topology
        if attn_metadata is None or not topology.pure:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)  # type: ignore[misc]
        if attn_metadata is None:
            return output
        keys, values = split(kv_cache)
        rows = len(attn_metadata.seq_lens)
        heads, kv_heads = query.shape[1], keys.shape[2]
        width = min(topology.width, attn_metadata.max_query_len)
        tiles = Tiles.choose(
            width=width, group=heads // kv_heads, requests=rows, kv_heads=kv_heads,
            max_slots=self.max_slots, sms=processors(query.device),
        )  # fmt: skip
        tree_attention(
            query, keys, values, attn_metadata.block_table, topology.lengths[:rows], topology.paths.masks,
            attn_metadata.query_start_loc, scale=self.scale, tiles=tiles, width=width, out=output,  # type: ignore[attr-defined]
        )  # fmt: skip
        return output


class _OnCPU:
    """Everything in torch, with a plain layout of the cache: for tests."""

    topology: Topology

    def do_kv_cache_update(
        self, _layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write keys and values [T, HKV, D]; a negative slot is padding."""
        keys, values = split(kv_cache)
        real = slot_mapping >= 0
        slots = slot_mapping[real].long()
        keys[slots // keys.shape[1], slots % keys.shape[1]] = key[: len(slot_mapping)][real].to(keys.dtype)
        values[slots // keys.shape[1], slots % keys.shape[1]] = value[: len(slot_mapping)][real].to(keys.dtype)

    def forward(
        self,
        _layer: Any,
        query: torch.Tensor,
        _key: torch.Tensor,
        _value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        keys, values = split(kv_cache)
        starts, ends = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for r, length in enumerate(ends):
            count = starts[r + 1] - starts[r]
            if count == 0:
                continue
            at = torch.arange(length)
            block, offset = attn_metadata.block_table[r].long()[at // keys.shape[1]], at % keys.shape[1]
            context = length - count
            seen = at <= context + torch.arange(count)[:, None]
            if int(self.topology.lengths[r]):
                drafted = (at - context).clamp(min=0)
                on_path = (self.topology.paths.masks[r, :count, None] >> drafted & 1).bool()
                seen = (at < context) | on_path
            rows = slice(starts[r], starts[r + 1])
            output.view(query.shape)[rows] = _attend(
                query[rows],
                keys[block, offset],
                values[block, offset],
                seen,
                self.scale,  # type: ignore[attr-defined]
            )
        return output


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    heads = keys.shape[1]
    grouped = query.unflatten(1, (heads, -1)).float()
    scores = torch.einsum("thgd,shd->thgs", grouped, keys.float()) * scale
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("thgs,shd->thgd", weights, values.float()).flatten(1, 2).to(query.dtype)


def take_over(layers: dict[str, Any], topology: Topology, *, max_slots: int) -> None:
    """Make each attention layer's implementation one that knows trees.

    Raises: ConfigError, for a backend or a feature that trees do not have.
    """
    for name, layer in layers.items():
        impl = layer.impl
        window = getattr(impl, "sliding_window", None)
        extras = {
            "a sliding window": window not in (None, -1, (-1, -1)),
            "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
            "a soft cap": bool(getattr(impl, "logits_soft_cap", None)),
            "sinks": getattr(impl, "sinks", None) is not None,
        }
        if extra := next((what for what, there in extras.items() if there), None):
            raise ConfigError(f"--tree does not know attention with {extra}, which {name} has. Leave it out.")
        on_gpu = topology.parents.is_cuda
        backend = layer.get_attn_backend().get_name()
        if on_gpu and backend not in KNOWN:
            raise ConfigError(f"--tree knows the attention backends {', '.join(KNOWN)}, not {backend}, of {name}.")
        kind = _OnGPU if on_gpu else _OnCPU
        ours: Any = object.__new__(type(f"Tree{type(impl).__name__}", (kind, type(impl)), {}))
        ours.__dict__.update(impl.__dict__)
        ours.topology, ours.max_slots = topology, max_slots
        layer.impl = ours
