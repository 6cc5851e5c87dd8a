"""Verification and commit by our kernels: the scratch is a record per place in the batch.

Shapes: S verified rows, N = K + 1 tokens of the longest, D channels of the convolution.
"""

from collections.abc import Sequence
from typing import Any

import torch

from thor_spec.kernels.conv_tree.kernel import conv_tree
from thor_spec.kernels.gdn_common.record import Record
from thor_spec.kernels.gdn_verify.kernel import gdn_verify
from thor_spec.kernels.state_commit import kernel
from thor_spec.kernels.state_commit.plan import Layer, Layers, Plan, Step
from thor_spec.kernels.tree_paths.reference import TreePaths
from thor_spec.vllm_plugin.one_state import cpu


class RecordScratch:
    """What one layer keeps from the verification to the commit."""

    def __init__(self, layer: Any, rows: int) -> None:
        where = {"dtype": layer.model_config.dtype, "device": layer.dt_bias.device}
        self.record = Record.allocate(
            slots=rows, rows=layer.nodes, heads=layer.num_k_heads // layer.tp_size,
            value_heads=layer.num_v_heads // layer.tp_size, key_dim=layer.head_k_dim, value_dim=layer.head_v_dim,
            **where,
        )  # fmt: skip
        self.inputs = torch.empty(rows, layer.nodes, layer.conv_dim // layer.tp_size, **where)

    @property
    def bytes(self) -> int:
        """Bytes for the largest batch."""
        return len(self.inputs) * self.record.bytes_per_slot + int(self.inputs.nbytes)

    def verify(self, layer: Any, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, on: Any) -> None:
        """Write the outputs of verified rows, one after another; states and windows stay as they are."""
        slots = on.spec_state_indices_tensor[:, 0]
        rows, starts = on.spec_rows[: len(slots)], on.spec_query_start_loc[: len(slots) + 1]
        weight = cpu.conv_weight(layer.conv1d) if x.device.type == "cpu" else layer.conv1d.weight.flatten(1)
        parents, paths = _trees(layer.topology, on)
        mixed = conv_tree(
            x, weight, layer.conv1d.bias, layer.window, slots, parents, starts,
            width=on.spec_width, inputs=self.inputs, record_indices=rows, out=x.new_empty(x.shape),
        )  # fmt: skip
        keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
        q, k, v = mixed.split([keys, keys, values], dim=-1)
        gdn_verify(
            q.unflatten(1, (-1, layer.head_k_dim)), k.unflatten(1, (-1, layer.head_k_dim)),
            v.unflatten(1, (-1, layer.head_v_dim)), a, b, layer.A_log, layer.dt_bias, layer.state, slots, starts,
            self.record, rows, paths=paths, width=on.spec_width, variant=layer.variant, out=out,
        )  # fmt: skip


def _trees(topology: Any, on: Any) -> tuple[torch.Tensor | None, TreePaths | None]:
    """Return parents and paths of the verified rows; None for chains."""
    if topology is None:
        return None, None
    count = len(on.spec_state_indices_tensor)
    if on.num_prefills == 0:  # in the order of the batch, at the addresses that a graph has captured
        return topology.row_parents[:count], TreePaths(
            masks=topology.paths.masks[:count], leaves=topology.paths.leaves[:count]
        )
    rows = on.spec_rows[:count].long()
    paths = TreePaths(masks=topology.paths.masks[rows], leaves=topology.paths.leaves[rows])
    return topology.row_parents[rows], paths


def to_commit(layers: Sequence[Any], groups: Sequence[int]) -> Layers:
    """Return what a commit works on, from layers of ours and the group of each."""
    return Layers.of(
        [
            Layer(state=x.state, window=x.window, record=x.scratch.record, inputs=x.scratch.inputs, group=group)
            for x, group in zip(layers, groups, strict=True)
        ]
    )


class RecordCommit:
    """Commits of all layers by three launches; nothing waits for the device."""

    def __init__(self, layers: Sequence[Any], groups: Sequence[int], tables: Sequence[torch.Tensor], rows: int) -> None:
        self.layers = to_commit(layers, groups)
        self._tables = kernel.table_of(tables)
        self._stride = tables[0].stride(0)
        self._plan = Plan.allocate(groups=len(tables), rows=rows, device=tables[0].device)
        for some in {1, rows}:  # compiled now, not in the first request: an empty plan commits nothing
            kernel.commit_states(self.layers, self._plan, rows=some)
            kernel.commit_windows(self.layers, self._plan, rows=some)

    def commit(self, step: Step, *, block_size: int) -> None:
        """Fold what the step's rows have gained into their states; ``block_size`` as in ``plan_commit``."""
        kernel.plan_commit(self._plan, step, self._tables, stride=self._stride, block_size=block_size)
        kernel.commit_states(self.layers, self._plan, rows=step.rows, path=step.path)
        kernel.commit_windows(self.layers, self._plan, rows=step.rows, path=step.path)
