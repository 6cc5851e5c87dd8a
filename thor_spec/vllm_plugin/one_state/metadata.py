"""Attention metadata of layers that keep one state: vLLM's own, with one state slot per row.

Shapes: R rows of the batch, S of them verified.
"""

from dataclasses import dataclass
from typing import Any

import torch

from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.transfer import to_device

_Backend: Any = compat.GDN_BACKEND.resolve()
_Metadata: Any = compat.GDN_METADATA.resolve()
_Builder: Any = compat.GDN_BUILDER.resolve()


@dataclass
class OneStateMetadata(_Metadata):
    """Adds the places in the batch of verified rows [S], int32: where their scratch is."""

    spec_rows: torch.Tensor | None = None
    spec_width: int = 0
    """Most tokens of a verified row, as far as the host knows."""


class OneStateBackend(_Backend):
    """vLLM's backend of Gated-DeltaNet layers, with our builder."""

    @staticmethod
    def get_name() -> str:
        """Return the name under which vLLM groups layers."""
        return "THOR_SPEC_GDN_ATTN"

    @staticmethod
    def get_builder_cls() -> type:
        """Return the builder."""
        return OneStateBuilder


class OneStateBuilder(_Builder):
    """Builds vLLM's metadata from one column of state slots.

    Buffers that CUDA graphs read stay where they are: vLLM's own, but for the slots' column, and ``_places``.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM's has K + 1 columns, into which one column would broadcast silently.
        most = len(self.num_accepted_tokens)
        self.spec_state_indices_tensor = torch.empty(most, 1, dtype=torch.int32, device=device)
        most = max(most, vllm_config.scheduler_config.max_num_seqs)  # eager batches may be beyond the largest graph
        self._places = torch.arange(most, dtype=torch.int32, device=device)
        # Only vLLM's exact class gets these: the same metadata for all groups, with their own slots.
        self.supports_update_block_table = vllm_config.use_v2_model_runner and device.type == "cuda"
        if self.supports_update_block_table:
            self.mamba_aligned_state_indices: torch.Tensor | None = None

    @property
    def _is_aligned(self) -> bool:
        return bool(self.vllm_config.cache_config.mamba_cache_mode == "align")

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> OneStateMetadata:
        """Return metadata whose ``spec_state_indices_tensor`` is [S or padded, 1] and adjacent."""
        m = common_attn_metadata
        if not self._is_aligned:
            m = m.replace(block_table_tensor=m.block_table_tensor[:, :1])
        built = super().build(common_prefix_len, m, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build)
        found = OneStateMetadata(**vars(built))
        if found.spec_sequence_masks is not None:
            found.spec_state_indices_tensor = found.spec_state_indices_tensor.contiguous()
            rows = len(found.spec_state_indices_tensor)
            found.spec_width = min(m.max_query_len, 1 + self.vllm_config.num_speculative_tokens)
            if found.num_prefills == 0:  # padding rows follow the verified ones
                found.spec_rows = self._places[:rows]
            else:
                places = found.spec_sequence_masks_cpu.nonzero().flatten().to(torch.int32)
                found.spec_rows = to_device(places, self._places.device)
        return found

    def update_block_table(
        self, metadata: OneStateMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> OneStateMetadata:
        """Return ``metadata`` with this group's slots."""
        found: OneStateMetadata = super().update_block_table(
            metadata, blk_table if self._is_aligned else blk_table[:, :1], slot_mapping
        )
        if found.spec_state_indices_tensor is not None:
            found.spec_state_indices_tensor = found.spec_state_indices_tensor.contiguous()
        return found
