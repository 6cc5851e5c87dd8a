"""Corruption planted on request, so that gates can be seen to turn red. Off unless the server was started for it.

A request names what is to go wrong with it; every other request of the batch is left alone. What is planted is what
speculation gets wrong when it gets something wrong: a state, a window, a cache row, a position, a count, a verdict.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from thor_spec.config import CONTROLS
from thor_spec.kernels.relax.reference import CERTAIN
from thor_spec.vllm_plugin.options import CONTROL_KEY

_STATE, _WINDOW = 1, 0  # a Gated-DeltaNet layer's cache is the convolution window and the recurrent state


class Controls:
    """Which request slots are corrupted, and how."""

    def __init__(self, vllm_config: Any) -> None:
        self._caches = vllm_config.compilation_config.static_forward_context
        self._kinds: dict[int, str] = {}
        self._windows: dict[int, torch.Tensor] = {}
        self._drift: dict[int, int] = {}

    def add(self, slot: int, extra: Mapping[str, Any] | None) -> None:
        """Take what a new request asks for; anything unknown is nothing."""
        self._windows.pop(slot, None)
        self._drift.pop(slot, None)
        kind = (extra or {}).get(CONTROL_KEY)
        self._kinds[slot] = kind if kind in CONTROLS else ""

    def rows(self, kind: str, slots: np.ndarray) -> list[int]:
        """Return the rows of a batch, whose request slots are given, that ask for ``kind``."""
        return [row for row, slot in enumerate(slots.tolist()) if self._kinds.get(slot) == kind]

    def before_forward(self, batch: Any, block_tables: Any, groups: Any, accepted: torch.Tensor | None) -> None:
        """Corrupt caches of requests that are past their prompt.

        Args:
            batch: vLLM's input batch.
            block_tables: one tensor for each cache group [R, blocks].
            groups: vLLM's cache groups.
            accepted: tokens that each slot took in the step before, which say where its state lies; None: no state.
        """
        for row in self.rows("state-slot", batch.idx_mapping_np):
            if found := self._recurrent(row, batch, block_tables, groups):
                tensors, blocks = found
                slot = int(batch.idx_mapping_np[row])
                tensors[_STATE][int(blocks[0 if accepted is None else int(accepted[slot]) - 1])].neg_()
        for row in self.rows("conv-window", batch.idx_mapping_np):
            if found := self._recurrent(row, batch, block_tables, groups):
                tensors, blocks = found
                slot = int(batch.idx_mapping_np[row])
                window = tensors[_WINDOW][int(blocks[0])]
                stale, self._windows[slot] = self._windows.get(slot), window.clone()
                if stale is not None:
                    window.copy_(stale)

    def swap_cache_rows(self, batch: Any, slot_mappings: torch.Tensor) -> None:
        """Have the first two tokens of a verified row written into each other's cache places."""
        for row in self._verified("kv-rows", batch):
            first = int(batch.query_start_loc_np[row])
            slot_mappings[:, first : first + 2] = slot_mappings[:, first : first + 2].flip(1)

    def shift_positions(self, batch: Any, positions: torch.Tensor) -> None:
        """Have a verified row count its positions one too far with every step; ``positions`` is [T] or [3, T]."""
        for row in self._verified("position", batch):
            first, last = batch.query_start_loc_np[row : row + 2].tolist()
            slot = int(batch.idx_mapping_np[row])
            self._drift[slot] = self._drift.get(slot, 0) + 1
            positions[..., first:last] += self._drift[slot]

    def miscount(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        """Have the next step start from the state one token off, either way."""
        for slot in slots.tolist():
            if self._kinds.get(slot) == "accepted-length":
                count = accepted[slot]
                accepted[slot] = torch.where(count > 1, count - 1, count + 1)

    def miscounted(self, slots: torch.Tensor, computed: torch.Tensor, sampled: torch.Tensor | int) -> torch.Tensor:
        """Return ``computed`` [S], the tokens that hold, one token off for the step's rows that are to be miscounted.

        Args:
            slots: request slot of each row [R].
            sampled: tokens that the step added to each row [R].
        """
        changed = computed.clone()
        for row, slot in enumerate(slots.tolist()):
            if self._kinds.get(slot) == "accepted-length" and isinstance(sampled, torch.Tensor):
                changed[slot] += torch.where(sampled[row] > 1, -1, 1)
        return changed

    def misjudge(self, processed: torch.Tensor, drafts: torch.Tensor, cu_rows: torch.Tensor, slots: np.ndarray) -> None:
        """Change processed logits, in place, so that drafts are taken unseen or the token after them is not the best.

        Args:
            processed: [L, V].
            drafts: the draft that row i judges is ``drafts[i + 1]`` [L].
            cu_rows: first row of each request, and the number of rows [R + 1].
            slots: [R].
        """
        starts: list[int] = cu_rows.tolist()
        for r in self.rows("blind-draft", slots):
            for row in range(starts[r], starts[r + 1] - 1):
                if (draft := int(drafts[row + 1])) >= 0:
                    processed[row, draft] = CERTAIN
        for r in self.rows("bonus-token", slots):
            bonus = processed[starts[r + 1] - 1]
            bonus[bonus.argmax()] = -torch.inf
        for r in self.rows("sharpened", slots):
            processed[starts[r] : starts[r + 1]] *= 1.5

    def _verified(self, kind: str, batch: Any) -> list[int]:
        """Return the rows with drafts among those of a kind."""
        counts = batch.num_draft_tokens_per_req
        return [] if counts is None else [r for r in self.rows(kind, batch.idx_mapping_np) if counts[r] > 0]

    def _recurrent(self, row: int, batch: Any, block_tables: Any, groups: Any) -> tuple[Any, torch.Tensor] | None:
        """Return the first recurrent layer's cache and a row's blocks in it; None within the prompt."""
        if not batch.is_prefilling_np[row]:
            for group, tables in zip(groups, block_tables, strict=True):
                if hasattr(group.kv_cache_spec, "mamba_type"):
                    return self._caches[group.layer_names[0]].kv_cache, tables[row]
        return None
