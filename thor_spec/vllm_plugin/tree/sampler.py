"""The walk: at each node the target's own choice, greedy or drawn, decides which child is accepted.

A draw at depth d takes the noise of the position that its token would get, so a seeded request draws what it would draw
without speculation. Siblings share that noise; at most one node of a depth is on the accepted path.

Shapes: L rows of logits, R requests, N drafted nodes of a tree, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch

from thor_spec.kernels.tree_walk import kernel, reference
from thor_spec.kernels.tree_walk.reference import Trees, Walked
from thor_spec.vllm_plugin import compat, counters
from thor_spec.vllm_plugin.acceptance import RelaxedRejectionSampler
from thor_spec.vllm_plugin.tree.steps import TreeSteps

_gumbel_sample: Any = compat.GUMBEL_SAMPLE.resolve()
_NO_LOGPROBS: int = compat.NO_LOGPROBS.resolve()


class TreeRejectionSampler(RelaxedRejectionSampler):
    """vLLM's rejection sampler with the walk in the place of its acceptance. Any batch, trees and chains mixed."""

    def __init__(self, *args: Any, trees: TreeSteps, tally: counters.Writer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        topology = trees.topology
        self._trees, self._topology, self._clock, self._counted = trees, topology, trees.clock, tally
        self._walked = Trees(
            parents=topology.parents, depths=topology.depths, path=topology.path, accepted=topology.accepted,
            counts=tally.counts,
        )  # fmt: skip
        self._rows_done = 0
        self._in_order = torch.zeros(0, dtype=torch.int64)

    def _verify(
        self,
        logits: torch.Tensor,
        _draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._clock.mark("verified")
        self._expect_corruption(verify_draft_sampled, cu_num_logits, idx_mapping_np)
        processed = self.sampler.apply_sampling_params(
            logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, draft_sampled, expanded_local_pos,
            seq_lens_upper_bound_np,
        )  # fmt: skip
        topology, states, batch = self._topology, self.sampler.sampling_states, self._batch()
        # Every token has its row of logits, unless there are prompts; or there are so many that they come in parts.
        is_whole = batch is not None and len(pos) == batch.num_tokens
        if is_whole:
            own = topology.positions[: len(pos)]
        else:
            own = pos - expanded_local_pos + topology.depths[expanded_idx_mapping.long(), expanded_local_pos.long()]
        choices = _gumbel_sample(
            processed, expanded_idx_mapping, states.temperature.gpu, states.seeds.gpu, own,
            apply_temperature=False, is_drafting=False, use_fp64=self.sampler.use_fp64_gumbel,
        )  # fmt: skip
        likely = None
        if is_relaxed := bool(self._rules.relaxed[idx_mapping_np].any()):
            likely = self._likely(processed, verify_draft_sampled, cu_num_logits, idx_mapping.long())
        step = kernel if processed.is_cuda else reference
        trees = self._of_rows(len(idx_mapping), batch)
        found = step.tree_walk(trees, verify_draft_sampled, choices, cu_num_logits, idx_mapping, likely)
        if is_relaxed:
            self._settle(trees, found, choices, cu_num_logits, idx_mapping.long())
        self._counted.publish()
        self._in_order = found.order
        topology.order = found.order if is_whole else None
        self._clock.mark("walked")
        return processed, found.tokens, found.counts

    def _batch(self) -> Any:
        """Return the batch whose trees were laid out; None, where nothing was."""
        return None if self._trees.step is None else self._trees.step[0]

    def _of_rows(self, rows: int, batch: Any) -> Trees:
        """Return the trees with the paths of the next rows of the batch: it may come in parts."""
        total = rows if batch is None else batch.num_reqs
        first = 0 if rows == total else self._rows_done
        self._rows_done = (first + rows) % total
        if first == 0:
            return self._walked
        return replace(self._walked, path=self._walked.path[first:], accepted=self._walked.accepted[first:])

    def _likely(
        self, processed: torch.Tensor, drafts: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Return p(token) of each node at its parent, where that reaches the request's threshold; else 0 [R, N + 1]."""
        eps, delta, _ = (numbers[slots] for numbers in self._rules.on_device())
        parents = self._walked.parents[slots]
        at = (
            (starts[:-1, None] + torch.arange(parents.shape[1], device=starts.device)).clamp(max=len(drafts) - 1).long()
        )
        row = at.gather(1, parents.clamp(min=0).long())
        log_p = processed.float().log_softmax(-1)
        entropy = -torch.nansum(log_p.exp() * log_p, dim=-1)
        p = log_p[row, drafts[at].long().clamp(min=0)].exp()
        threshold = torch.minimum(eps[:, None], delta[:, None] * torch.exp(-entropy[row]))
        return torch.where((p >= threshold) & (threshold > 0), p, 0.0)

    def _settle(
        self, trees: Trees, found: Walked, choices: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Count what became of drafts, by rule and depth, as ``kernels.relax`` does for chains."""
        rows, width = found.tokens.shape
        node = torch.arange(width, device=starts.device)
        parents, path = trees.parents[slots].long(), trees.path[:rows].long()
        depths = torch.where(node < starts.diff()[:, None], trees.depths[slots], 0)
        last, place = trees.accepted[:rows, None].long() - 1, node[:-1]
        own = choices[(starts[:-1, None] + path).clamp(max=len(choices) - 1).long()]
        goes_on = torch.zeros_like(depths).scatter_reduce(1, parents.clamp(min=0), depths, "amax") > depths
        stopped = goes_on.gather(1, path.gather(1, last))
        differs = (own != found.tokens)[:, :-1]
        judged = (
            place < depths.amax(1, keepdim=True),
            place < last,
            differs & (place < last),
            (place == last) & stopped,
        )
        kinds = self._rules.on_device()[2][slots].long()
        self._count.counts.index_add_(0, kinds, torch.stack(judged, dim=1).long())
        self._count.publish()

    def _get_logprobs_tensors(
        self, sampled: torch.Tensor, num_sampled: torch.Tensor, logits: torch.Tensor, *args: Any
    ) -> Any:
        if args[-1] != _NO_LOGPROBS:
            logits = logits[self._in_order]
        return super()._get_logprobs_tensors(sampled, num_sampled, logits, *args)
