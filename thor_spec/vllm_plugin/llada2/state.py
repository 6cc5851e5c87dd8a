"""The runner's state for LLaDA2: a block per request, and attention over whole blocks."""

from typing import Any

import numpy as np
import torch

from thor_spec.diffusion import layout
from thor_spec.vllm_plugin import compat, receipt
from thor_spec.vllm_plugin.llada2.canvases import Canvases
from thor_spec.vllm_plugin.llada2.sampler import BlockSampler
from thor_spec.vllm_plugin.model_state import ThorModelState
from thor_spec.vllm_plugin.transfer import to_device


class LLaDA2ModelState(ThorModelState):
    """Drives LLaDA2 in vLLM's V2 runner."""

    num_new_sampled_tokens_per_step = 0  # all tokens of a step are drafts, that is, the block

    def __init__(self, vllm_config: Any, *args: Any) -> None:
        super().__init__(vllm_config, *args)
        config = self.model_config.hf_config
        self.block = int(vllm_config.diffusion_config.canvas_length)
        self.canvases = Canvases(
            self.max_num_reqs, self.block, layout.mask_of(config.to_dict()), self.options.denoising, self.device
        )
        self._build = compat.ATTENTION_METADATA.resolve()
        self._full = compat.GRAPH_MODE.resolve().FULL

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        """Take steps of blocks instead of sampling."""
        with receipt.of_failure():
            parallel = self.vllm_config.parallel_config
            return BlockSampler(sampler, self.canvases, self.max_model_len, parallel), None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Begin the request's block."""
        super().add_request(req_index, new_req_data)
        known = new_req_data.prefill_token_ids or new_req_data.prompt_token_ids or ()
        self.canvases.add(req_index, known, new_req_data.sampling_params)

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
        ubatch_idx: int = 0,
    ) -> dict[str, Any]:
        """Return each layer's metadata: rows of at most a block that see everything up to their own end."""
        is_padded = cudagraph_mode == self._full
        rows = input_batch.num_reqs_after_padding if is_padded else input_batch.num_reqs
        tokens = input_batch.num_tokens_after_padding if is_padded else input_batch.num_tokens
        starts_np, starts = input_batch.query_start_loc_np[: rows + 1], input_batch.query_start_loc[: rows + 1]
        ends, upper = input_batch.seq_lens[:rows], input_batch.seq_lens_cpu_upper_bound[:rows]
        if np.diff(starts_np).max() > self.block:
            if is_padded:  # a graph knows the rows that it was captured with, and would attend to others silently
                raise RuntimeError("a graph was captured or replayed over rows that are longer than a block")
            owner, starts_np, short = in_blocks(starts_np, self.block)
            starts, index = (to_device(torch.from_numpy(host), starts.device) for host in (starts_np, owner))
            index = index.long()
            ends = ends[index] - to_device(torch.from_numpy(short), ends.device)
            upper = upper[torch.from_numpy(owner).long()] - torch.from_numpy(short)
            block_tables = tuple(table[index] for table in block_tables)
            rows = len(owner)
        metadata: dict[str, Any] = self._build(
            attn_groups=attn_groups,
            num_reqs=rows,
            num_tokens=tokens,
            query_start_loc_gpu=starts,
            query_start_loc_cpu=torch.from_numpy(starts_np),
            max_query_len=int(np.diff(starts_np).max()),
            seq_lens=ends,
            max_seq_len=self.max_model_len if for_capture else min(int(upper.max()), self.max_model_len),
            block_tables=block_tables,
            slot_mappings=slot_mappings,
            kv_cache_config=kv_cache_config,
            seq_lens_cpu_upper_bound=upper,
            positions=input_batch.positions,
            for_cudagraph_capture=for_capture,
            causal=False,
            ubatch_idx=ubatch_idx,
        )
        return metadata


def in_blocks(starts: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Take rows of tokens apart into rows of at most ``block``; every row begins where a block begins.

    Args:
        starts: where each of R rows starts, and the end [R + 1] int32.

    Returns: for each of N new rows, whose it was [N]; where they start [N + 1]; and how many of the old row's tokens
        follow after it [N]. All int32.
    """
    lengths = np.diff(starts)
    counts = np.maximum(-(-lengths // block), 1)
    owner = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    reach = np.minimum((place + 1) * block, lengths[owner])  # tokens of the old row up to the new row's end
    new_starts = np.append(starts[owner] + place * block, starts[-1]).astype(np.int32)
    return owner, new_starts, (lengths[owner] - reach).astype(np.int32)
