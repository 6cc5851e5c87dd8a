"""What a commit works on: the layers' tensors by address, and per row how far to go and where.

Shapes: L layers, G groups of layers that share block tables, R rows of the batch, S request slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thor_spec.errors import ConfigError
from thor_spec.kernels.gdn_common.checks import check_record, check_state
from thor_spec.kernels.gdn_common.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one layer keeps per sequence, and its scratch."""

    state: torch.Tensor
    """[slots, HV, V, K], bfloat16 or float32."""
    window: torch.Tensor
    """The convolution's committed inputs, oldest first [slots, D, W - 1]; any strides."""
    record: Record
    """Rows by place in the batch, without deferred ones."""
    inputs: torch.Tensor
    """The convolution's inputs of this step, by place in the batch [rows of the record, N, D]."""
    group: int
    """Which block table its slots come from."""


ADDRESSES = ("state", "k", "k_scale", "u", "log_decay", "window", "inputs", "group")


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of equal shape, which one launch may serve."""

    layers: tuple[Layer, ...]
    alignment: int
    """Bytes of which every address is a multiple: 16, where all are."""
    table: torch.Tensor
    """Address of each tensor, and the group [L, 8], int64; see ``ADDRESSES``."""

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> "Layers":
        """Return the table of ``layers``, on their device. Raises: ConfigError, where they differ in shape."""
        first, rows = layers[0], []
        for layer in layers:
            if _shape(layer) != _shape(first):
                raise ConfigError(f"One launch serves layers of one shape, not {_shape(first)} and {_shape(layer)}.")
            if layer.record.pending is not None or layer.record.per_channel or not layer.inputs.is_contiguous():
                raise ConfigError("Commits of all layers need records without pending rows and adjacent inputs.")
            check_state(layer.state, *layer.state.shape[1:])
            check_record(layer.record, layer.state, layer.record.k.shape[2], layer.state.shape[3], layer.record.k.dtype)
            r = layer.record
            tensors = (layer.state, r.k, r.k_scale, r.u, r.log_decay, layer.window, layer.inputs)
            rows.append([*(tensor.data_ptr() for tensor in tensors), layer.group])
        alignment = 1 if any(address % 16 for row in rows for address in row[:-1]) else 16
        return cls(tuple(layers), alignment, torch.tensor(rows, dtype=torch.int64).to(first.state.device))


def _shape(layer: Layer) -> tuple[object, ...]:
    record = layer.record
    tensors = (layer.state, layer.window, layer.inputs, record.k, record.u)
    return tuple((tensor.dtype, tensor.shape[1:], tensor.stride()) for tensor in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the engine, as far as a commit must know it; tensors of the device."""

    idx_mapping: torch.Tensor
    """Request slot of each row [R]; negative: none."""
    verified: torch.Tensor
    """Whether the row's tokens were verified, and so are not yet in its state [R or more], bool."""
    seq_lens: torch.Tensor
    """Tokens of the sequence with everything that was scheduled [R or more]."""
    query_start_loc: torch.Tensor
    """First scheduled token of each row [R + 1 or more]."""
    computed: torch.Tensor
    """Tokens of the sequence that hold, after the step, by request slot [S]."""
    path: torch.Tensor | None = None
    """Which scheduled token each accepted one is [R, at least the most accepted], int32, entries adjacent; None: the
    first ones."""

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return int(self.idx_mapping.numel())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Per row of the batch, written by ``plan_commit`` on the device."""

    accepted: torch.Tensor
    """Tokens to commit [R], int32; 0 for rows that verified nothing."""
    cut: torch.Tensor
    """Of those, the ones up to the last block boundary, where the state is saved too [R], int32; 0: nowhere."""
    slots: torch.Tensor
    """State slot of each row [G, R], int32; 0: none."""
    cut_slots: torch.Tensor
    """Where the state at the boundary goes [G, R], int32; 0: nowhere."""

    @classmethod
    def allocate(cls, *, groups: int, rows: int, device: torch.device | str) -> "Plan":
        """Return buffers for up to ``rows`` rows, all zero."""

        def new(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        return cls(accepted=new(rows), cut=new(rows), slots=new(groups, rows), cut_slots=new(groups, rows))
