"""What a step of trees needs around its forward pass, for one engine.

Shapes: R rows of the batch, S request slots, T scheduled tokens.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from thor_spec.ddtree.shape import TreeShape
from thor_spec.kernels.kv_compact import kernel, reference
from thor_spec.vllm_plugin import compat, counters
from thor_spec.vllm_plugin.options import TREE_KEY
from thor_spec.vllm_plugin.tree import attention, choice
from thor_spec.vllm_plugin.tree.budget import Budget
from thor_spec.vllm_plugin.tree.clock import Clock
from thor_spec.vllm_plugin.tree.topology import Topology


class TreeSteps:
    """Lays trees out before a pass, and keeps keys and values of the accepted path after it."""

    def __init__(self, vllm_config: Any, model: Any, shape: TreeShape, rows: int, device: torch.device) -> None:
        choice.require(vllm_config, shape)
        tokens, parallel = vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.parallel_config
        self.topology = Topology(shape, rows, tokens, device)
        kind = compat.ATTENTION_LAYER.resolve()
        self.layers = {layer.layer_name: layer for layer in model.modules() if isinstance(layer, kind)}
        attention.take_over(self.layers, self.topology, max_slots=vllm_config.model_config.max_model_len)
        for layer in model.modules():
            if hasattr(layer, "scratch"):
                layer.topology = self.topology
        self.budget = Budget(shape, choice.deep(vllm_config), device, parallel) if shape.auto else None
        phases = counters.HostWriter.open((len(counters.PHASES_OF_TREES) + 1,), counters.PHASES, parallel)
        self.clock = Clock(device, phases, self.budget.heard if self.budget is not None else lambda *_: None)
        self.timing: Callable[[], None] | None = None
        """Called at the start of passes that are timed at start-up, over trees that look like real ones."""
        self.buffers: list[tuple[int, Any]] = []
        self.step: tuple[Any, torch.Tensor] | None = None

    def bind(self, kv_cache_config: Any) -> None:
        """Take the addresses of the caches, by group of layers."""
        for number, group in enumerate(kv_cache_config.kv_cache_groups):
            caches = [self.layers[name].kv_cache for name in group.layer_names if name in self.layers]
            if caches:
                tensors = [half for cache in caches for half in attention.split(cache)]
                on_gpu = tensors[0].is_cuda
                self.buffers.append((number, kernel.Buffers.of(tensors) if on_gpu else tensors))

    def add(self, slot: int, params: Any) -> None:
        """Take a new request; it drafts a chain where its history or a grammar matters, which vLLM reads in a line."""
        extra = params.extra_args or {}
        needs_chain = (
            extra.get(TREE_KEY) == "chain"
            or bool(params.frequency_penalty or params.presence_penalty)
            or params.repetition_penalty != 1.0
            or bool(params.bad_words)
            or params.structured_outputs is not None
            or getattr(params, "thinking_token_budget", None) is not None
        )
        self.topology.add(slot, chain=needs_chain)

    def prepare(self, batch: Any, block_tables: Any, slot_mappings: torch.Tensor, *, for_capture: bool) -> None:
        """Lay out the coming pass."""
        if self.timing is not None:
            for table in block_tables:  # block 0 is nobody's, and its rows would be left out
                table[: batch.num_reqs].clamp_(min=1)
        if for_capture:
            self.topology.forget(batch if self.timing is not None else None)
            self.step = None
            return
        prompts = batch.is_prefilling_np
        if batch.prefill_runs_as_decode_np is not None:
            prompts = prompts & ~batch.prefill_runs_as_decode_np
        counts = batch.num_scheduled_tokens
        verified: np.ndarray = ~prompts & (counts > 0) & (counts <= self.topology.width)
        self.topology.prepare(batch, verified)
        self.step = batch, slot_mappings

    def positions(self, batch: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Return the model's inputs with positions of a node's depth; they stay at one address, which graphs read."""
        if self.timing is not None:
            self.timing()
        elif self.step is not None:
            self._begin()
        tokens = batch.num_tokens_after_padding
        is_laid_out = self.step is not None and self.step[0] is batch  # captures and some dummy runs have no trees
        if (of_model := given.get("positions")) is not None:  # several per token (M-RoPE), in a buffer of their own
            if is_laid_out:
                of_model += self.topology.offsets[:tokens]
            return given
        mine = self.topology.positions[:tokens]
        if not is_laid_out:
            mine.copy_(batch.positions[:tokens])
        return {**given, "positions": mine}

    def _begin(self) -> None:
        if self.budget is None:
            self.clock.begin(None)
        else:
            self.clock.begin(self.budget.label, wanted=self.budget.is_wanted)

    def dummy_positions(self, tokens: int, given: dict[str, Any]) -> dict[str, Any]:
        """Return the same for a pass that graphs are captured from."""
        return given if "positions" in given else {**given, "positions": self.topology.positions[:tokens]}

    def path(self, rows: int) -> torch.Tensor:
        """Return the accepted nodes of the first rows of the batch [rows, N + 1]."""
        return self.topology.path[:rows]

    def commit(self, rows: int) -> None:
        """Move keys and values of the first rows' accepted paths to where a chain's would be."""
        if self.step is None:
            return
        (batch, slot_mappings), self.step = self.step, None
        path, accepted = self.path(rows), self.topology.accepted[:rows]
        for group, buffers in self.buffers:
            compact: Any = kernel.kv_compact if isinstance(buffers, kernel.Buffers) else reference.kv_compact
            compact(buffers, slot_mappings[group], batch.query_start_loc, path, accepted)
