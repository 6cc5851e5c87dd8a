"""Checks of tensors that kernels address by shape."""

import torch

from thor_spec.errors import ConfigError
from thor_spec.kernels.gdn_common.record import Record


def check_state(state: torch.Tensor, value_heads: int, value_dim: int, key_dim: int) -> None:
    """Raise ConfigError unless ``state`` is [slots, HV, V, K] with each slot contiguous."""
    shape = (value_heads, value_dim, key_dim)
    if tuple(state.shape[1:]) != shape or state.stride()[1:] != (value_dim * key_dim, key_dim, 1):
        raise ConfigError(
            f"state {tuple(state.shape)} with strides {state.stride()} must be [slots, {value_heads}, {value_dim}, "
            f"{key_dim}], each slot contiguous: kernels compute addresses from shapes."
        )


def check_record(record: Record, state: torch.Tensor, heads: int, key_dim: int, dtype: torch.dtype) -> None:
    """Raise ConfigError unless the record belongs to such a state and such keys."""
    if record.u.shape[2:] != state.shape[1:3] or record.k.shape[2:] != (heads, key_dim) or record.k.dtype != dtype:
        raise ConfigError(
            f"The record was allocated for {record.u.shape[2]} value heads of {record.u.shape[3]} and keys "
            f"{tuple(record.k.shape[2:])} in {record.k.dtype}, not for this layer's "
            f"{tuple(state.shape[1:3])} and {(heads, key_dim)} in {dtype}."
        )
