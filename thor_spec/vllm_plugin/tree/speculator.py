"""vLLM's DFlash speculator, drafting trees out of the one pass that it makes anyway.

Shapes: R rows of the batch, S request slots, K draft positions, N drafted nodes, W candidates of a position.
"""

import copy
from typing import Any

import torch

from thor_spec.ddtree.shape import TreeShape
from thor_spec.kernels.tree_build import kernel, reference
from thor_spec.kernels.tree_build.reference import Layout, Trees
from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.tree import choice
from thor_spec.vllm_plugin.tree.topology import Topology

_DFlash: Any = compat.DFLASH_SPECULATOR.resolve()


class TreeSpeculator(_DFlash):
    """Asks the drafter for K positions, and gives N nodes; ``topology`` learns how they hang together."""

    def __init__(self, vllm_config: Any, device: torch.device, shape: TreeShape) -> None:
        self.shape = shape
        self._deep = shape.deep(choice.positions(vllm_config))
        narrow = copy.copy(vllm_config)  # shares everything, as vLLM's own copy does
        narrow.speculative_config = copy.copy(vllm_config.speculative_config)
        narrow.speculative_config.num_speculative_tokens = self._deep
        super().__init__(narrow, device)
        rows = self.max_num_reqs * self._deep
        self._width = min(shape.candidates(), self.vocab_size)
        # Written inside the drafter's graph.
        self._scores = torch.zeros(rows, self._width, dtype=torch.float32, device=device)
        self._candidates = torch.zeros(rows, self._width, dtype=torch.int64, device=device)
        if shape.widths:
            self._layout = Layout(*(torch.tensor(x, dtype=torch.int32, device=device) for x in shape.layout()))
        self._of_nodes = torch.zeros(self.max_num_reqs, shape.nodes, dtype=torch.float32, device=device)
        self._topology: Topology | None = None
        self._trees: Any = None

    def set_attn(self, model_state: Any, *args: Any) -> None:
        """Find the topology, which the model state has made."""
        super().set_attn(model_state, *args)
        self._topology = model_state.topology
        self._trees = model_state.trees

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        return min(num_reqs * (self.shape.nodes + 1), int(self.max_num_tokens))

    def sample_draft(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Keep each position's likeliest tokens, and return the first [R K]."""
        logits = self.compute_draft_logits(hidden_states, 0)
        scores, candidates = logits.float().log_softmax(-1).topk(self._width)
        self._scores[: len(scores)] = scores
        self._candidates[: len(scores)] = candidates
        return candidates[:, 0]

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the nodes of each row's next tree [R, N]."""
        topology = self._topology
        if topology is not None and not dummy_run:
            self._trees.clock.mark("draft")
            order = topology.of_path(input_batch)
            if not aux_hidden_states:
                last_hidden_states = last_hidden_states[order]
            elif topology.pure:  # vLLM joins them anyway; prompts may be too long to be held twice
                joined = torch.cat([hidden[: len(order)] for hidden in aux_hidden_states], dim=-1)
                aux_hidden_states = [joined[order]]
            else:
                aux_hidden_states = [hidden[order] for hidden in aux_hidden_states]
        drafts: torch.Tensor = super().propose(
            input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, *args,
            dummy_run=dummy_run, **kwargs,
        )  # fmt: skip
        if topology is None or dummy_run:
            return drafts.new_zeros(len(drafts), self.shape.nodes)
        clock, budget = self._trees.clock, self._trees.budget
        clock.mark("drafted")
        straight = budget is not None and budget.draft()
        trees = self._build(len(drafts), input_batch.idx_mapping, topology, straight=straight)
        if budget is not None:
            budget.tell(trees, self._kept(self._scores, len(drafts)), args[0], topology.accepted)
        clock.mark("built")
        return trees.tokens

    def _kept(self, what: torch.Tensor, rows: int) -> torch.Tensor:
        return what[: rows * self._deep].view(rows, self._deep, self._width)

    def _build(self, rows: int, slots: torch.Tensor, topology: Topology, *, straight: bool) -> Trees:
        scores, candidates = self._kept(self._scores, rows), self._kept(self._candidates, rows)
        build = kernel if scores.is_cuda else reference
        chains, slots = topology.requests_for_chains(), slots[:rows]
        out = Trees(
            tokens=torch.empty(rows, self.shape.nodes, dtype=torch.int64, device=scores.device),
            parents=topology.parents, depths=topology.depths, scores=self._of_nodes[:rows],
        )  # fmt: skip
        found: Trees
        if self.shape.widths:
            found = build.lay_widths(self._layout, candidates, chains, slots=slots, out=out)
        else:
            found = build.build_trees(
                scores, candidates, chains, nodes=self.shape.nodes, straight=straight, slots=slots, out=out
            )
        return found
