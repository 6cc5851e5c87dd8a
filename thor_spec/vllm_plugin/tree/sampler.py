"""The walk: at each node the target's own choice, greedy or drawn, decides which child is accepted.

A draw at depth d takes the noise of the position that its token would get, so a seeded request draws what it would draw
without speculation. Siblings share that noise; at most one node of a depth is on the accepted path.

Shapes: L rows of logits, R requests, N drafted nodes of a tree, V vocabulary.
"""

from typing import Any

import torch

from thor_spec.vllm_plugin import compat, counters
from thor_spec.vllm_plugin.acceptance import RelaxedRejectionSampler
from thor_spec.vllm_plugin.tree.steps import TreeSteps

_gumbel_sample: Any = compat.GUMBEL_SAMPLE.resolve()


def walk(
    parents: torch.Tensor,
    depths: torch.Tensor,
    tokens: torch.Tensor,
    choices: torch.Tensor,
    likely: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each request's accepted nodes, root first and then any [R, N + 1], and their number [R].

    Args:
        parents: [R, N + 1]; -1 for the root, and for nodes that are none.
        depths: [R, N + 1].
        tokens: of the nodes [R, N + 1]; -1: not to be accepted.
        choices: the target's next token at each node [R, N + 1].
        likely: the target's probability of each node's token where its request's rule takes it, else 0 [R, N + 1];
            None: no request is relaxed. Where no child carries the choice, the likeliest such child is accepted.
    """
    width = parents.shape[1]
    node = torch.arange(width, device=parents.device)
    hop = parents.clamp(min=0).long()
    is_real = (parents >= 0) & (tokens >= 0)
    reached = is_real & (tokens == choices.gather(1, hop))
    if likely is not None:
        worth = torch.where(reached, 2.0, torch.where(is_real, likely, 0.0))
        best = torch.zeros_like(worth).scatter_reduce(1, hop, worth, "amax")
        reached = (worth > 0) & (worth == best.gather(1, hop))
        first = torch.where(reached, node, width)  # of equal ones
        reached &= node == torch.full_like(hop, width).scatter_reduce(1, hop, first, "amin").gather(1, hop)
    reached[:, 0] = True
    for _ in range((width - 1).bit_length()):  # a node is reached if its whole path is
        reached = reached & reached.gather(1, hop)
        hop = hop.gather(1, hop)
    # Children of a node carry different tokens, so that what is reached is one path: one node of each depth.
    path = node.repeat(len(parents), 1)
    path = torch.cat([path, path[:, :1]], dim=1)
    path.scatter_(1, torch.where(reached, depths, width).long(), node.expand_as(reached))
    return path[:, :width], reached.sum(1)


class TreeRejectionSampler(RelaxedRejectionSampler):
    """vLLM's rejection sampler with the walk in the place of its acceptance. Any batch, trees and chains mixed."""

    def __init__(self, *args: Any, trees: TreeSteps, tally: counters.Writer, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._topology, self._clock = trees.topology, trees.clock
        self._counted = tally
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
        topology, states = self._topology, self.sampler.sampling_states
        depth = topology.depths[expanded_idx_mapping.long(), expanded_local_pos.long()]
        choices = _gumbel_sample(
            processed, expanded_idx_mapping, states.temperature.gpu, states.seeds.gpu, pos - expanded_local_pos + depth,
            apply_temperature=False, is_drafting=False, use_fp64=self.sampler.use_fp64_gumbel,
        )  # fmt: skip
        slots, starts = idx_mapping.long(), cu_num_logits.long()
        parents = topology.parents[slots]
        node = torch.arange(topology.width, device=logits.device)
        inside = node < starts.diff()[:, None]
        at = torch.where(inside, starts[:-1, None] + node, 0)
        tokens = torch.where(inside, verify_draft_sampled[at].long(), -1)
        chosen = choices[at].long()
        is_relaxed = bool(self._rules.relaxed[idx_mapping_np].any())
        likely = self._likely(processed, at, parents, tokens, slots) if is_relaxed else None
        path, accepted = walk(parents, topology.depths[slots], tokens, chosen, likely)
        topology.path[slots] = path.to(torch.int32)
        topology.accepted[slots] = accepted.to(torch.int32)
        self._tally(inside, topology.depths[slots], accepted)
        of_path = starts[:-1, None] + path
        rows = torch.arange(len(logits), device=logits.device)
        moved = of_path[_request_of(starts, rows), expanded_local_pos.long()]
        is_accepted = expanded_local_pos < accepted[_request_of(starts, rows)]
        self._in_order = torch.where(is_accepted, moved, rows)
        sampled = chosen.gather(1, path)
        if is_relaxed:
            onward = tokens.gather(1, path.roll(-1, 1))
            sampled = torch.where(node < accepted[:, None] - 1, onward, sampled)
            self._settle(inside, parents, path, accepted, chosen.gather(1, path) != onward, slots)
        sampled = torch.where(node < accepted[:, None], sampled, 0)
        self._clock.mark("walked")
        return processed, sampled, accepted.to(torch.int32)

    def _likely(
        self, processed: torch.Tensor, at: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Return p(token) of each node at its parent, where that reaches the request's threshold; else 0 [R, N + 1]."""
        eps, delta, _ = (numbers[slots] for numbers in self._rules.on_device())
        log_p = processed.float().log_softmax(-1)
        entropy = -torch.nansum(log_p.exp() * log_p, dim=-1)
        row = at.gather(1, parents.clamp(min=0).long())
        p = log_p[row, tokens.clamp(min=0)].exp()
        threshold = torch.minimum(eps[:, None], delta[:, None] * torch.exp(-entropy[row]))
        return torch.where((p >= threshold) & (threshold > 0), p, 0.0)

    def _settle(
        self,
        inside: torch.Tensor,
        parents: torch.Tensor,
        path: torch.Tensor,
        accepted: torch.Tensor,
        differs: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Count what became of drafts, by rule and depth, as ``kernels.relax`` does for chains."""
        depths = torch.where(inside, self._topology.depths[slots], 0)
        place = torch.arange(inside.shape[1] - 1, device=inside.device)
        last = accepted[:, None] - 1
        inner = torch.zeros_like(depths).scatter_reduce(1, parents.clamp(min=0).long(), depths, "amax")
        stopped = inner.gather(1, path.gather(1, last)) > 0
        found = [place < depths.amax(1, keepdim=True), place < last, differs[:, :-1] & (place < last)]
        found.append((place == last) & stopped)
        kinds = self._rules.on_device()[2][slots].long()
        self._count.counts.index_add_(0, kinds, torch.stack(found, dim=1).long())
        self._count.publish()

    def _tally(self, inside: torch.Tensor, depths: torch.Tensor, accepted: torch.Tensor) -> None:
        """Count the rows that have drafts."""
        nodes = inside.sum(1) - 1
        found = torch.stack([nodes, torch.where(inside, depths, 0).amax(1).long(), accepted - 1])
        places = found + torch.arange(len(found), device=found.device)[:, None] * inside.shape[1]
        self._counted.counts.view(-1).scatter_add_(0, places.flatten(), (nodes > 0).long().repeat(len(found)))
        self._counted.publish()

    def _get_logprobs_tensors(
        self, sampled: torch.Tensor, num_sampled: torch.Tensor, logits: torch.Tensor, *args: Any
    ) -> Any:
        if args[-1] != compat.NO_LOGPROBS.resolve():
            logits = logits[self._in_order]
        return super()._get_logprobs_tensors(sampled, num_sampled, logits, *args)


def _request_of(starts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(starts[1:], rows, right=True).clamp(max=len(starts) - 2)
