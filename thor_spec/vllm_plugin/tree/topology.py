"""The trees of an engine's requests, and what a step is told of them. Buffers stay where they are: graphs read them.

Shapes: S request slots, R rows of the batch, T scheduled tokens, N drafted nodes of a tree.
"""

from typing import Any

import numpy as np
import torch

from thor_spec.ddtree.shape import TreeShape
from thor_spec.kernels.tree_build.reference import Trees
from thor_spec.kernels.tree_paths import kernel as tree_paths
from thor_spec.kernels.tree_paths.reference import TreePaths, allocate
from thor_spec.kernels.tree_rows import kernel, reference
from thor_spec.kernels.tree_rows.reference import Rows


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
        self.path = self.depths.clone()
        """Accepted nodes of this step, root first, then anything [S, N + 1], int32."""
        self.accepted = torch.zeros(slots, dtype=torch.int32, device=device)
        """Nodes of this step's path, the root's included [S]; 0 where nothing was verified."""
        self._wants_chain = np.zeros(slots, dtype=bool)
        self.chains = torch.zeros(slots, dtype=torch.bool, device=device)
        """Requests that draft chains [S]."""
        # By row of the batch.
        self.chain, self.depths_of_chains = chain, self.depths.clone()
        self.row_parents = chain.clone()
        self.paths: TreePaths = allocate(slots, self.width, device)
        self.lengths = torch.zeros(slots, dtype=torch.int32, device=device)
        """Slots in use of rows that verify a tree, theirs included; 0 for others [R]."""
        self.offsets = torch.zeros(tokens, dtype=torch.int64, device=device)
        """Position of each token less its place in its row and the row's start [T]."""
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.pure = True
        """Whether every row of the step is verified."""
        self._rows = Rows(
            row_parents=self.row_parents, lengths=self.lengths, offsets=self.offsets, path=self.path,
            accepted=self.accepted,
        )  # fmt: skip
        self._tokens = torch.arange(tokens, device=device)
        self._is_stale = False

    def add(self, slot: int, *, chain: bool) -> None:
        """Take a new request, whose first drafts are placeholders."""
        self._wants_chain[slot] = chain
        self._is_stale = True
        self.parents[slot] = self.chain[0]
        self.depths[slot] = self._nodes

    def requests_for_chains(self) -> torch.Tensor:
        """Return ``chains``, up to date."""
        if self._is_stale:
            # From a fresh buffer, so that the next request may be staged while this copy is under way.
            self.chains.copy_(torch.from_numpy(self._wants_chain.copy()), non_blocking=True)
            self._is_stale = False
        return self.chains

    def drafted(self, slots: torch.Tensor, trees: Trees) -> None:
        """Keep the trees of the next step [R] until it comes."""
        self.parents[slots] = trees.parents
        self.depths[slots] = trees.depths

    def prepare(self, batch: Any, verified: np.ndarray) -> None:
        """Lay out a step's trees.

        Args:
            verified: whether a row's tokens are a root and its drafts [R], bool.
        """
        rows, starts = batch.num_reqs, batch.query_start_loc
        self.pure = bool(verified.all())
        is_verified = _to(torch.from_numpy(verified), self.device)
        lay = kernel.lay_rows if is_verified.is_cuda else reference.lay_rows
        lay(self._rows, self.parents, self.depths, batch.idx_mapping[:rows], is_verified, starts, batch.seq_lens)
        lay_out(self.row_parents[:rows], starts[: rows + 1], self.paths)

    def forget(self, timed: Any = None) -> None:
        """Lay out a step of nobody: captures and dummy runs; of chains, for a batch whose pass is ``timed``."""
        self.pure = True
        self.row_parents.copy_(self.chain)
        self.lengths.zero_()
        self.offsets.zero_()
        if timed is not None:
            rows = timed.num_reqs
            lay_out(self.row_parents[:rows], timed.query_start_loc[: rows + 1], self.paths)
            self.lengths[:rows] = timed.seq_lens[:rows]

    def of_path(self, batch: Any) -> torch.Tensor:
        """Return, for each token of a step, the one whose outputs belong in its place [T]: paths come to the front."""
        order = self._tokens[: batch.num_tokens].clone()
        write = kernel.path_order if order.is_cuda else reference.path_order
        write(order, self.path, self.accepted, batch.idx_mapping[: batch.num_reqs], batch.query_start_loc)
        return order


def lay_out(parents: torch.Tensor, starts: torch.Tensor, out: TreePaths) -> None:
    """Write masks and leaves of the first R rows, as ``kernels.tree_paths`` does; on a CPU in torch."""
    rows, width = parents.shape
    if parents.is_cuda:
        tree_paths.tree_paths(parents, starts, out=out)
        return
    nodes = torch.arange(width)
    own = nodes < starts.diff()[:, None]
    bits = torch.ones(width, dtype=torch.int64) << nodes
    has_parent = (parents >= 0) & (parents < nodes)
    hop = torch.where(has_parent, parents, nodes).long()
    inner = torch.zeros(rows, width, dtype=torch.bool)
    inner[(has_parent & own).nonzero(as_tuple=True)[0], hop[has_parent & own]] = True
    masks = bits.repeat(rows, 1)
    for _ in range((width - 1).bit_length()):
        masks = masks | masks.gather(1, hop)
        hop = hop.gather(1, hop)
    out.masks[:rows] = torch.where(own, masks, 0)
    out.leaves[:rows] = torch.where(own & ~inner, bits, 0).sum(1)


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":  # or the copy would wait for the device
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
