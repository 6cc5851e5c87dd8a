"""vLLM's GPU path of a Gated-DeltaNet layer, run where there is no GPU: one state per draft position, its own kernels.

On a CPU vLLM verifies by C++ operators, whose sums run in another order. What our interpreted kernels must equal, bit
for bit, are its Triton kernels, so here those are interpreted. Prompts take the CPU's path in both.
"""

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import torch

from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.one_state import cpu
from thor_spec.vllm_plugin.one_state.layer import _without_verified

_Stock: Any = compat.GDN_LAYER.resolve()
_context: Any = compat.FORWARD_CONTEXT.resolve()


def convolve(
    x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: None, activation: str, *,
    conv_state_indices: torch.Tensor, num_accepted_tokens: torch.Tensor, query_start_loc: torch.Tensor, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Do what vLLM's ``causal_conv1d_update`` does with drafts; the interpreter cannot, it multiplies no bfloat16.

    Products are rounded to bfloat16 and summed in float32, oldest tap first (``test_conv_tree`` compares the kernels).
    """
    assert bias is None
    assert activation == "silu"
    out, kept = torch.empty_like(x), weight.shape[1] - 1
    starts = query_start_loc.tolist()
    for row, (slot, accepted) in enumerate(
        zip(conv_state_indices.tolist(), num_accepted_tokens.tolist(), strict=False)
    ):
        own = x[starts[row] : starts[row + 1]].T
        window = conv_state[slot][:, accepted - 1 : accepted - 1 + kept]
        joined = torch.cat([window, own], dim=1)
        total = torch.zeros(own.shape)
        for tap in range(kept + 1):
            total += (joined[:, tap : tap + own.shape[1]] * weight[:, tap : tap + 1]).float()
        sums = total.numpy()
        out[starts[row] : starts[row + 1]] = torch.from_numpy(sums / (1 + np.exp(-sums))).to(x.dtype).T
        conv_state[slot][:, : joined.shape[1] - 1] = joined[:, 1:]
    return out


class InterpretedSnapshots(_Stock):
    """Keeps states as [V, K], as the GPU does."""

    variant = "snapshots"

    @property
    def state(self) -> torch.Tensor:
        state: torch.Tensor = self.kv_cache[1]
        return state

    @property
    def window(self) -> torch.Tensor:
        return self.kv_cache[0].transpose(-1, -2)[..., : self.conv_kernel_size - 1]

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.forward_cuda(hidden_states)
        return out

    def _forward_core(self, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
        everything = _context().attn_metadata
        whole = everything.get(self.prefix) if isinstance(everything, dict) else None
        if whole is None or whole.spec_sequence_masks is None:
            cpu.prefill(self, whole, mixed_qkv, b, a, core_attn_out)
            return
        if whole.num_prefills == 0:
            self._snapshots(mixed_qkv, b, a, core_attn_out)
            return
        alone = dataclasses.replace(
            whole,
            num_prefills=0,
            num_prefill_tokens=0,
            num_actual_tokens=whole.num_spec_decode_tokens,
            non_spec_query_start_loc=None,
            non_spec_state_indices_tensor=None,
        )
        for which, run, metadata in (
            (whole.spec_token_indx, self._snapshots, alone),
            (whole.non_spec_token_indx, self._prompts, _without_verified(whole)),
        ):
            out = core_attn_out.new_zeros(len(which), *core_attn_out.shape[1:])
            everything[self.prefix] = metadata
            run(mixed_qkv[which], b[which], a[which], out)
            core_attn_out[which] = out
        everything[self.prefix] = whole

    def _prompts(self, x: Any, b: Any, a: Any, out: Any) -> None:
        cpu.prefill(self, _context().attn_metadata[self.prefix], x, b, a, out)

    def _snapshots(self, x: Any, b: Any, a: Any, out: Any) -> None:
        packed = self.conv1d.weight.data
        self.conv1d.weight.data = cpu.conv_weight(self.conv1d).unsqueeze(1)
        with mock.patch.object(compat.GDN_LAYER.module(), "causal_conv1d_update", convolve):
            super()._forward_core(x, b, a, out)
        self.conv1d.weight.data = packed
