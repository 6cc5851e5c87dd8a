"""Verification and commit on the CPU by vLLM's own operators, which the interpreter is a thousand times slower than.

They know only how to write a state per position. So here those are the scratch: K + 1 states for every place in the
batch, of which the commit keeps one. The states have the bits of vLLM's snapshots, and their layout [K, V].
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from thor_spec.kernels.state_commit import reference
from thor_spec.kernels.state_commit.plan import Plan, Step
from thor_spec.vllm_plugin import compat


class NativeScratch:
    """States and windows of one layer, by place in the batch and position. Place 0 is nobody's, as in vLLM's pages."""

    def __init__(self, layer: Any, rows: int) -> None:
        conv_dtype, state_dtype = layer.get_state_dtype()
        shape = (layer.num_v_heads // layer.tp_size, layer.head_v_dim, layer.head_k_dim)
        self.states = torch.empty(layer.nodes, rows + 1, *shape, dtype=state_dtype)
        length = layer.conv_kernel_size - 1 + layer.nodes - 1
        self.windows = torch.empty(rows + 1, length, layer.conv_dim // layer.tp_size, dtype=conv_dtype).transpose(1, 2)
        self._slots = torch.arange(layer.nodes * (rows + 1), dtype=torch.int32).view(layer.nodes, rows + 1).T

    @property
    def bytes(self) -> int:
        """Bytes for the largest batch."""
        return int(self.states.nbytes + self.windows.nbytes)

    def verify(self, layer: Any, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, on: Any) -> None:
        """Write the outputs of verified rows, one after another; states and windows stay as they are."""
        count, kept = on.num_spec_decodes, layer.conv_kernel_size - 1
        width = on.spec_width  # rows are padded to the longest of the step, not to K + 1
        slots, places = on.spec_state_indices_tensor[:count, 0].long(), on.spec_rows[:count].long() + 1
        self.states[0, places] = layer.state[slots]
        self.windows[places, :, :kept] = layer.window[slots]
        alone = dataclasses.replace(
            on,
            spec_state_indices_tensor=self._slots[places, :width].contiguous(),
            num_accepted_tokens=torch.ones(count, dtype=torch.int32),
        )
        states = self.states.flatten(0, 1)
        by_channel = states.view(len(states), states.shape[1], states.shape[3], states.shape[2])
        # Looked up in its module, where ``cpu_verify`` has repaired it.
        out[:] = compat.CPU_SPEC_FORWARD.resolve()(
            layer, alone, x.contiguous(), b.contiguous(), a.contiguous(), self.windows[:, :, : kept + width - 1],
            by_channel, kept + 1, kept + width - 1,
        )  # fmt: skip


class NativeCommit:
    """Commits by copies."""

    def __init__(self, layers: Sequence[Any], groups: Sequence[int], tables: Sequence[torch.Tensor], rows: int) -> None:
        self._layers, self._groups, self._tables = layers, groups, tables
        self._plan = Plan.allocate(groups=len(tables), rows=rows, device="cpu")

    def commit(self, step: Step, *, block_size: int) -> None:
        """Copy what the step's rows have gained; ``block_size`` as in ``plan_commit``."""
        plan, rows = self._plan, step.rows
        reference.plan_commit(plan, step, self._tables, block_size=block_size)
        for layer, group in zip(self._layers, self._groups, strict=True):
            kept = layer.conv_kernel_size - 1
            for slots, counts in ((plan.cut_slots, plan.cut), (plan.slots, plan.accepted)):
                ends = zip(slots[group, :rows].tolist(), counts[:rows].tolist(), strict=True)
                for place, (slot, count) in enumerate(ends, start=1):
                    if slot > 0 and count > 0:
                        layer.state[slot] = layer.scratch.states[count - 1, place]
                        layer.window[slot] = layer.scratch.windows[place, :, count - 1 : count - 1 + kept]
