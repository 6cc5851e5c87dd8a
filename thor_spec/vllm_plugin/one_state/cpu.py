"""Prompts of our layer without a GPU, by vLLM's CPU operators."""

import dataclasses
from typing import Any

import torch

from thor_spec.vllm_plugin import compat

_alone: Any = compat.CPU_PREFILL.resolve()


def conv_weight(conv1d: Any) -> torch.Tensor:
    """Return the convolution's weights [D, taps]: vLLM packs them in place on some CPUs, and keeps a copy."""
    weight: torch.Tensor | None = getattr(conv1d, "_cpu_unpacked_conv_weight", None)
    return conv1d.weight.flatten(1) if weight is None else weight


def prefill(
    layer: Any, metadata: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor
) -> None:
    """Run the rows of ``metadata`` through vLLM's CPU path, from and to the states they own.

    Its operators keep a state as [K, V]. The interpreted kernels keep [V, K] as on the GPU; for them the states of the
    batch are taken out, turned, and put back turned.
    """
    if metadata is None or metadata.num_actual_tokens == 0:
        return
    count = metadata.num_decodes + metadata.num_prefills
    slots = metadata.non_spec_state_indices_tensor[:count].long()
    staged = layer.state[slots] if layer.variant == "native" else layer.state[slots].transpose(-1, -2)
    staged = staged.contiguous().view(count, layer.state.shape[1], layer.head_k_dim, layer.head_v_dim)
    windows = layer.window[slots].contiguous()
    tokens = slice(metadata.num_actual_tokens)
    alone = dataclasses.replace(metadata, non_spec_state_indices_tensor=torch.arange(count, dtype=torch.int32))
    _alone(
        layer, alone, mixed_qkv[tokens].contiguous(), b[tokens].contiguous(), a[tokens].contiguous(), out, windows,
        staged, layer.conv_kernel_size,
    )  # fmt: skip
    back = staged.view(count, *layer.state.shape[1:]) if layer.variant == "native" else staged.transpose(-1, -2)
    layer.state[slots] = back
    layer.window[slots] = windows
