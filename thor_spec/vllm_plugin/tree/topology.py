"""The trees of an engine's requests, and what a step is told of them. Buffers stay where they are: graphs read them.

Shapes: S request slots, and rows of the largest batch; R rows of the batch, T scheduled tokens, N drafted nodes of a
tree.
"""

from typing import Any

import numpy as np
import torch

from thor_spec.ddtree.shape import TreeShape
from thor_spec.kernels.tree_paths import kernel as tree_paths
from thor_spec.kernels.tree_paths.reference import TreePaths, allocate, by_doubling
from thor_spec.kernels.tree_rows import kernel, reference
from thor_spec.kernels.tree_rows.reference import Rows
from thor_spec.vllm_plugin.transfer import to_device


class Topology:
    """Written by the speculator and the sampler by request slot, read by layers by row of the batch."""

    def __init__(self, shape: TreeShape, slots: int, tokens: int, device: torch.device) -> None:
        self.shape, self.width, self.device = shape, shape.nodes + 1, device
        self._nodes = torch.arange(self.width, dtype=torch.int32, device=device)
        chain = (self._nodes - 1).repeat(slots, 1)
        self.parents = chain.clone()
        """Of each request's drafts [S, N + 1], int32; a chain, until something else was drafted."""
        self.depths = self._nodes.repeat(slots, 1)
        """[S, N + 1], int32."""
        self._wants_chain = np.zeros(slots, dtype=bool)
        self.chains = torch.zeros(slots, dtype=torch.bool, device=device)
        """Requests that draft chains [S]."""
        # By row of the batch.
        self.path = self.depths.clone()
        """Accepted nodes of this step, root first, then anything [S, N + 1], int32."""
        self.accepted = torch.zeros(slots, dtype=torch.int32, device=device)
        """Nodes of this step's path, the root's included [S]; 0 where nothing was verified."""
        self.order: torch.Tensor | None = None
        """What ``of_path`` returns, where the walk has found it already."""
        self._chain = chain
        self.row_parents = chain.clone()
        self.paths: TreePaths = allocate(slots, self.width, device)
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        """Slots in use of rows that verify a tree, theirs included; 0 for others [R]."""
        self.offsets = torch.zeros(tokens, dtype=torch.int64, device=device)
        """Position of each token less its place in its row and the row's start [T]."""
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        """Length of the context plus the node's depth [T]."""
        self.pure = True
        """Whether every row of the step is verified."""
        self._rows = Rows(
            row_parents=self.row_parents, paths=self.paths, lengths=self.lengths, offsets=self.offsets,
            positions=self.positions, path=self.path, accepted=self.accepted,
        )  # fmt: skip
        self._all = torch.ones(slots, dtype=torch.bool, device=device)
        self._tokens = torch.arange(tokens, device=device)
        self._is_stale = False

    def add(self, slot: int, *, chain: bool) -> None:
        """Take a new request, whose first drafts are placeholders."""
        self._wants_chain[slot] = chain
        self._is_stale = True
        self.parents[slot] = self._chain[0]
        self.depths[slot] = self._nodes

    def requests_for_chains(self) -> torch.Tensor:
        """Return ``chains``, up to date."""
        if self._is_stale:
            # From a fresh buffer, so that the next request may be staged while this copy is under way.
            self.chains.copy_(torch.from_numpy(self._wants_chain.copy()), non_blocking=True)
            self._is_stale = False
        return self.chains

    def prepare(self, batch: Any, verified: np.ndarray) -> None:
        """Lay out a step's trees.

        Args:
            verified: whether a row's tokens are a root and its drafts [R], bool.
        """
        self.pure, self.order = bool(verified.all()), None
        is_verified = self._all if self.pure else to_device(torch.from_numpy(verified), self.device)
        lay = kernel.lay_rows if self.parents.is_cuda else reference.lay_rows
        lay(
            self._rows, self.parents, self.depths, batch.idx_mapping[: batch.num_reqs], is_verified,
            batch.query_start_loc, batch.seq_lens, batch.positions[: batch.num_tokens_after_padding],
        )  # fmt: skip

    def forget(self, timed: Any = None) -> None:
        """Lay out a step of nobody: captures and dummy runs; of chains, for a batch whose pass is ``timed``."""
        self.pure = True
        self.row_parents.copy_(self._chain)
        self.lengths.zero_()
        self.offsets.zero_()
        self.positions.zero_()
        if timed is not None:
            rows = timed.num_reqs
            lay_out(self.row_parents[:rows], timed.query_start_loc[: rows + 1], self.paths)
            self.lengths[:rows] = timed.seq_lens[:rows]

    def of_path(self, batch: Any) -> torch.Tensor:
        """Return, for each token of a step, the one whose outputs belong in its place [T]: paths come to the front."""
        if self.order is not None:
            return self.order
        order, rows = self._tokens[: batch.num_tokens].clone(), batch.num_reqs
        write = kernel.path_order if order.is_cuda else reference.path_order
        write(order, self.path[:rows], self.accepted[:rows], batch.query_start_loc)
        return order


def lay_out(parents: torch.Tensor, starts: torch.Tensor, out: TreePaths) -> None:
    """Write masks and leaves of the first R rows, as ``kernels.tree_paths`` does; on a CPU in torch."""
    if parents.is_cuda:
        tree_paths.tree_paths(parents, starts, out=out)
    else:
        by_doubling(parents, starts, out=out)
