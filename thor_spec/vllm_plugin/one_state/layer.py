"""The Gated-DeltaNet layer with one state and one convolution window per sequence.

Shapes: T tokens of the step, HV value heads of this rank, D channels.
"""

import dataclasses
from typing import Any

import torch

from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.one_state import choice, cpu, unrolled
from thor_spec.vllm_plugin.one_state.metadata import OneStateBackend, OneStateMetadata
from thor_spec.vllm_plugin.one_state.variants import VARIANTS

_Stock: Any = compat.GDN_LAYER.resolve()
_forward_context: Any = compat.FORWARD_CONTEXT.resolve()
_dim_first: Any = compat.CONV_DIM_FIRST.resolve()


class ReconstructedGDN(_Stock):
    """vLLM's layer, but verified rows only read their state and leave a record; ``steps`` commits it.

    Prompts and their chunks take vLLM's path, which writes the one state in place.
    """

    def __init__(self, config: Any, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(config, vllm_config, prefix, **kwargs)
        _, state_dtype = self.get_state_dtype()
        if self.activation != "silu" or state_dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(
                f"One state per sequence needs SiLU and a state in float32 or bfloat16; {prefix} has "
                f"{self.activation} and {state_dtype}. Use --state snapshot, or another --mamba-ssm-cache-dtype."
            )
        # The fused CUDA kernels would write every position of a row into its one slot, silently.
        self.gdn_decode_kernel = "triton"
        self.enable_fused_gdn_spec_decode = False
        self.variant = choice.kernel(vllm_config)
        self.nodes = 1 + int(vllm_config.num_speculative_tokens)
        self.topology: Any = None  # of draft trees, where there are
        # Allocated with the weights, and so counted before vLLM sizes its cache.
        self.scratch = VARIANTS[self.variant].scratch(self, vllm_config.scheduler_config.max_num_seqs)

    def get_state_shape(self) -> Any:
        """Return the shapes of the window, kernel - 1 wide, and of the state."""
        self.num_spec = 0  # nothing else reads it
        return super().get_state_shape()

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """Return vLLM's, without blocks for draft positions."""
        return dataclasses.replace(super().get_kv_cache_spec(vllm_config), num_speculative_blocks=0)

    def get_attn_backend(self) -> type:
        """Return the backend whose metadata has one slot per row."""
        return OneStateBackend

    @property
    def state(self) -> torch.Tensor:
        """The committed states [slots, HV, V, K]; [K, V] inside with vLLM's CPU operators."""
        state: torch.Tensor = self.kv_cache[1]
        return state

    @property
    def window(self) -> torch.Tensor:
        """The committed inputs of the convolution, oldest first [slots, D, kernel - 1]."""
        window: torch.Tensor = self.kv_cache[0]
        return window if _dim_first() else window.transpose(-1, -2)

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Take the GPU's path, down to ``_forward_core``."""
        out: torch.Tensor = self.forward_cuda(hidden_states)
        return out

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Write the outputs [T, HV, V] of ``mixed_qkv`` [T, D] and the gates ``b`` and ``a`` [T, HV]."""
        everything = _forward_context().attn_metadata
        metadata = everything.get(self.prefix) if isinstance(everything, dict) else None
        if metadata is None or metadata.spec_sequence_masks is None:
            self._unverified(mixed_qkv, b, a, core_attn_out, metadata)
            return
        if metadata.num_prefills == 0:
            tokens = slice(metadata.num_actual_tokens)
            self._verify(mixed_qkv[tokens], b[tokens], a[tokens], core_attn_out[tokens], metadata)
            return
        for which, run, on in (
            (metadata.spec_token_indx, self._verify, metadata),
            (metadata.non_spec_token_indx, self._unverified, _without_verified(metadata)),
        ):
            out = core_attn_out.new_zeros(len(which), *core_attn_out.shape[1:])
            run(mixed_qkv.index_select(0, which), b.index_select(0, which), a.index_select(0, which), out, on)
            core_attn_out.index_copy_(0, which, out)

    def _verify(self, *args: Any) -> None:
        self.scratch.verify(self, *args)

    def _unverified(
        self, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, metadata: OneStateMetadata | None
    ) -> None:
        """Run prompts through vLLM's own path."""
        if x.device.type == "cpu":
            in_torch = x.dtype != torch.bfloat16 and metadata is not None
            (unrolled.prefill if in_torch else cpu.prefill)(self, metadata, x, b, a, out)
            return
        everything = _forward_context().attn_metadata
        if metadata is None or everything[self.prefix] is metadata:
            super()._forward_core(x, b, a, out)
            return
        whole, everything[self.prefix] = everything[self.prefix], metadata
        try:
            super()._forward_core(x, b, a, out)
        finally:
            everything[self.prefix] = whole


def _without_verified(metadata: OneStateMetadata) -> OneStateMetadata:
    """Return the metadata of the other rows, as of a batch of their own."""
    changes = {
        "num_spec_decodes": 0,
        "num_spec_decode_tokens": 0,
        "num_actual_tokens": metadata.num_prefill_tokens,
        "spec_query_start_loc": None,
        "spec_state_indices_tensor": None,
        "spec_sequence_masks": None,
        "spec_sequence_masks_cpu": None,
        "spec_token_indx": None,
        "non_spec_token_indx": None,
        "num_accepted_tokens": None,
    }
    return dataclasses.replace(metadata, **changes)
