"""Corruption of what a request is given from the prefix cache, so that its gate can be seen to turn red.

What is corrupted lies in the cache, and would be given to others as well. So a request must name a ``cache_salt``,
under which nobody else finds anything: the front door refuses one without.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from thor_spec.config import CACHED_CONTROLS
from thor_spec.vllm_plugin.options import CONTROL_KEY

_TENSOR = {"cached-window": 0, "cached-state": 1}  # a Gated-DeltaNet layer's cache is window and recurrent state


class CachedControls:
    """Which request slots are corrupted at their first step, and how."""

    def __init__(self, vllm_config: Any) -> None:
        self._caches = vllm_config.compilation_config.static_forward_context
        self._target_layers: int = vllm_config.model_config.hf_text_config.num_hidden_layers
        self._asked: dict[int, tuple[str, int]] = {}

    def add(self, slot: int, extra: Mapping[str, Any] | None, computed: int) -> None:
        """Take what a new request asks for, ``computed`` tokens of which come from the cache."""
        self._asked.pop(slot, None)
        kind = (extra or {}).get(CONTROL_KEY)
        if kind in CACHED_CONTROLS and computed > 0:
            self._asked[slot] = kind, computed

    def before_step(self, slots: np.ndarray, block_tables: Any, kv_cache_config: Any) -> None:
        """Corrupt the cached blocks of requests that have their first step; before states are copied out of them.

        Args:
            slots: request slot of each row [R].
            block_tables: one tensor for each cache group [R, blocks].
            kv_cache_config: vLLM's.
        """
        for row, slot in enumerate(slots.tolist()):
            if slot not in self._asked:
                continue
            kind, computed = self._asked.pop(slot)
            for group, tables in zip(kv_cache_config.kv_cache_groups, block_tables, strict=True):
                recurrent = hasattr(group.kv_cache_spec, "mamba_type")
                if recurrent and kind in _TENSOR:
                    cache = self._caches[group.layer_names[0]].kv_cache[_TENSOR[kind]]
                    cache[int(tables[row][computed // group.kv_cache_spec.block_size - 1])].neg_()
                    break
                names = [name for name in group.layer_names if self._is_drafters(name) == (kind == "cached-drafts")]
                if not recurrent and kind not in _TENSOR and names:
                    _negate(self._caches[names[0]].kv_cache, tables[row], kv_cache_config.num_blocks, computed, group)

    def _is_drafters(self, layer: str) -> bool:
        # The drafter's layers are numbered behind the target's.
        return any(part.isdecimal() and int(part) >= self._target_layers for part in layer.split("."))


def _negate(cache: Any, table: Any, num_blocks: int, computed: int, group: Any) -> None:
    """Change the sign of a request's cached keys and values in one layer."""
    (cache,) = cache if isinstance(cache, list | tuple) else (cache,)
    dim = next(d for d in (0, 1) if cache.shape[d] >= num_blocks and cache.shape[d] % num_blocks == 0)
    parts = cache.shape[dim] // num_blocks  # a kernel may cut a block of the pool into several of its own
    for block in table[: computed // group.kv_cache_spec.block_size * parts].tolist():
        cache.select(dim, block).neg_()
