"""What happens between the forward pass of a step and the next: accepted tokens are folded into the states.

Shapes: R rows of the batch, S request slots.
"""

from typing import Any

import torch

from thor_spec.errors import ConfigError
from thor_spec.kernels.state_commit.plan import Step
from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.one_state.variants import VARIANTS


class Steps:
    """Which rows a step verifies, and its commit, for one engine."""

    def __init__(self, vllm_config: Any, model: Any, rows: int) -> None:
        from thor_spec.vllm_plugin.one_state.layer import ReconstructedGDN

        self._vllm_config = vllm_config
        self._rows = rows
        self.layers = [layer for layer in model.modules() if isinstance(layer, ReconstructedGDN)]
        if not self.layers:
            raise ConfigError(
                "This model has no Gated-DeltaNet layer that can keep one state per sequence. Use --state snapshot."
            )
        self.scratch_bytes: int = sum(layer.scratch.bytes for layer in self.layers)
        self.described = ""
        """What a sequence keeps, in words, once memory is bound."""
        self.pending: tuple[Any, torch.Tensor] | None = None
        """Batch and verified rows of the step that is to be committed."""

    def bind(self, kv_cache_config: Any, block_tables: Any) -> None:
        """Take the addresses of what a commit works on: caches, scratch and block tables stay where they are."""
        self._block_size = 0
        if self._vllm_config.cache_config.mamba_cache_mode == "align":
            self._block_size = self._vllm_config.cache_config.mamba_block_size
        by_name = {layer.prefix: layer for layer in self.layers}
        layers: list[Any] = []
        groups: list[int] = []
        tables: list[torch.Tensor] = []
        for group, table in zip(kv_cache_config.kv_cache_groups, block_tables.block_tables, strict=True):
            if ours := [by_name[name] for name in group.layer_names if name in by_name]:
                layers += ours
                groups += [len(tables)] * len(ours)
                tables.append(table.gpu)
        self.layers, self.groups, self.tables = layers, groups, tables
        self.committer = VARIANTS[layers[0].variant].commit(layers, groups, tables, self._rows)
        kept = sum(layer.state[0].nbytes + layer.window[0].nbytes for layer in layers)
        self.described = (
            f"one per sequence of {kept / 2**20:.2f} MiB (reconstruct, {layers[0].variant}); scratch for {self._rows} "
            f"sequences {self.scratch_bytes / 2**20:.1f} MiB"
        )
        compat.LOG.info("Recurrent states of %d layers: %s.", len(layers), self.described)

    def verify_padded_prompts(self, batch: Any) -> None:
        """Have fresh prompts with drafts verified, from a state of zeros.

        vLLM pads a prompt of one token with placeholder drafts, to keep the steps of others uniform, and then runs it
        as a prompt: with a state that cannot take the placeholders back.
        """
        if batch.num_draft_tokens_per_req is None or not batch.is_prefilling_np.any():
            return
        before = batch.seq_lens_cpu_upper_bound[: batch.num_reqs].numpy() - batch.num_scheduled_tokens
        padded = batch.is_prefilling_np & (before <= 0) & (batch.num_draft_tokens_per_req > 0)
        if not padded.any():
            return
        known = batch.prefill_runs_as_decode_np
        batch.prefill_runs_as_decode_np = padded if known is None else known | padded
        last = batch.num_scheduled_tokens[padded] - 1
        columns = torch.from_numpy(last // self._block_size if self._block_size else 0 * last).long()
        slots = batch.idx_mapping[torch.from_numpy(padded.nonzero()[0]).to(batch.idx_mapping.device)].long()
        columns = columns.to(slots.device)
        for layer, group in zip(self.layers, self.groups, strict=True):
            blocks = self.tables[group][slots, columns].long()
            layer.state[blocks] = 0
            layer.window[blocks] = 0

    def prepared(self, input_batch: Any, attn_metadata: dict[str, Any], *, for_capture: bool) -> None:
        """Note which rows the coming forward pass verifies."""
        self.pending = None
        on = attn_metadata.get(self.layers[0].prefix)  # a dummy step of vLLM's tuning leaves recurrent layers out
        if on is not None and on.spec_sequence_masks is not None and not for_capture:
            self.pending = input_batch, on.spec_sequence_masks

    def commit(self, idx_mapping: torch.Tensor, computed: torch.Tensor, path: torch.Tensor | None = None) -> None:
        """Fold what the step's rows have gained into their states, and forget the rest.

        Args:
            idx_mapping: request slot of each row [R].
            computed: tokens that hold, after the step, by request slot [S].
            path: as in ``state_commit.plan.Step``.
        """
        if self.pending is None:
            return
        (batch, verified), self.pending = self.pending, None
        step = Step(
            idx_mapping=idx_mapping,
            verified=verified,
            seq_lens=batch.seq_lens,
            query_start_loc=batch.query_start_loc,
            computed=computed,
            path=path,
        )
        self.committer.commit(step, block_size=self._block_size)
