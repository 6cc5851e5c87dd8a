"""What ``kernels.py`` times: layers with their buffers, and the ways to verify and commit one step on them.

Shapes: R requests, N nodes of each, H key heads, HV value heads, K key dim, V value dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from thor_spec.ddtree.best_first import build
from thor_spec.kernels.gdn_commit import kernel as commit
from thor_spec.kernels.gdn_common.record import Record, rows_needed
from thor_spec.kernels.gdn_verify import kernel as verify
from thor_spec.kernels.gdn_verify.tiles import Tiles
from thor_spec.kernels.tree_paths import kernel as tree_paths

Launch = Callable[[], None]


@dataclass(frozen=True)
class Dims:
    """Head dims of a layer; the default is Qwen3.5-35B-A3B's."""

    heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128

    @property
    def state_bytes(self) -> int:
        """Bytes of one float32 state."""
        return self.value_heads * self.value_dim * self.key_dim * 4


@dataclass(frozen=True)
class Shape:
    """A batch of equal trees."""

    requests: int
    name: str
    parents: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, self.nodes - 1))

    @property
    def accepted(self) -> list[int]:
        """A path to a deepest node, cut at 6 nodes: what a drafter of 15 gets accepted on average."""
        depth = [0] * self.nodes
        for t, p in enumerate(self.parents):
            depth[t] = depth[p] + 1 if p >= 0 else 0
        node = depth.index(max(depth))
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1][:6]

    @property
    def longest(self) -> int:
        return max(len(self._path(t)) for t in range(self.nodes))

    def _path(self, t: int) -> list[int]:
        return [] if t < 0 else [*self._path(self.parents[t]), t]


def chain(n: int) -> tuple[int, ...]:
    return tuple(range(-1, n - 1))


def full(*widths: int) -> tuple[int, ...]:
    parents, level = [-1], [0]
    for width in widths:
        level_next = []
        for node in level:
            level_next += range(len(parents), len(parents) + width)
            parents += [node] * width
        level = level_next
    return tuple(parents)


def best_first(drafts: int) -> tuple[int, ...]:
    """DDTree's tree for a drafter whose ranks fall off as 0.7, 0.15, 0.08 ..., at every one of 15 positions."""
    ranks = [0.7, 0.15, 0.08, 0.04, 0.02]
    marginals = [[(rank, math.log(p)) for rank, p in enumerate(ranks)] for _ in range(15)]
    return build(0, marginals, drafts).parents


class Layer:
    """One layer's inputs, shared by all ways; each way has its own states and record."""

    def __init__(self, dims: Dims, shape: Shape, device: str, seed: int) -> None:
        self.dims, self.shape, self.device = dims, shape, device
        generator = torch.Generator(device=device).manual_seed(seed)
        self.generator = generator
        tokens = shape.requests * shape.nodes

        def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=device).to(dtype)

        sizes = [dims.heads * dims.key_dim, dims.heads * dims.key_dim, dims.value_heads * dims.value_dim]
        q, k, v = normal(tokens, sum(sizes)).split(sizes, dim=1)
        self.inputs = {
            "q": q.unflatten(1, (dims.heads, dims.key_dim)),
            "k": k.unflatten(1, (dims.heads, dims.key_dim)),
            "v": v.unflatten(1, (dims.value_heads, dims.value_dim)),
            "a": normal(tokens, dims.value_heads),
            "b": normal(tokens, dims.value_heads),
            "A_log": normal(dims.value_heads, dtype=torch.float32),
            "dt_bias": normal(dims.value_heads, dtype=torch.float32),
        }
        self.cu = (torch.arange(shape.requests + 1, device=device) * shape.nodes).to(torch.int32)
        self.slots = torch.arange(1, shape.requests + 1, dtype=torch.int32, device=device)
        parents = torch.tensor([shape.parents] * shape.requests, dtype=torch.int32, device=device)
        self.paths = None if shape.is_chain else tree_paths.tree_paths(parents, self.cu)
        self.path = torch.tensor([shape.accepted] * shape.requests, dtype=torch.int32, device=device)
        self.accepted = torch.full((shape.requests,), len(shape.accepted), dtype=torch.int32, device=device)
        self.out = torch.empty(tokens, dims.value_heads, dims.value_dim, dtype=torch.bfloat16, device=device)

    def states(self, count: int) -> torch.Tensor:
        d = self.dims
        return torch.randn(count, d.value_heads, d.value_dim, d.key_dim, generator=self.generator, device=self.device)

    def record(self, period: int | None, steps: int = 1) -> Record:
        """A record with the rows of ``steps`` steps pending, if commits are deferred; due if the period is reached."""
        d, shape = self.dims, self.shape
        record = Record.allocate(
            slots=shape.requests + 1, rows=rows_needed(shape.nodes, path=shape.longest, period=period), heads=d.heads,
            value_heads=d.value_heads, key_dim=d.key_dim, value_dim=d.value_dim, dtype=torch.bfloat16,
            device=self.device, deferred=period is not None,
        )  # fmt: skip
        if record.pending is not None and record.flush is not None:
            for buffer in (record.k, record.k_scale, record.u, record.log_decay):
                buffer.zero_()  # replays commit these rows again and again: they must leave the state as it is
            pending = steps * len(shape.accepted)
            record.pending.fill_(pending)
            record.flush.fill_(int(pending >= (period or 1)))
        return record

    def deferred(self, variant: verify.Variant, period: int) -> list[Launch]:
        """The steps from one write of the state to the next, each with what is pending then; the last one writes."""
        state = self.states(self.shape.requests + 1)
        steps = -(-period // len(self.shape.accepted))
        return [self._step(variant, period, state, self.record(period, i)) for i in range(1, steps + 1)]

    def ours(self, variant: verify.Variant, period: int | None, tiles: Tiles | None = None) -> Launch:
        """One step: verify and commit at once (None), fused (1), or with a commit that is not due yet."""
        return self._step(variant, period, self.states(self.shape.requests + 1), self.record(period), tiles)

    def solution(self, tiles: Tiles | None = None) -> Launch:
        """The first of the two launches of ``wy`` alone."""
        launch = self.ours("wy", 1, tiles)

        def first() -> None:
            with mock.patch.object(verify, "wy", mock.MagicMock(arg_names=verify.wy.arg_names)):
                launch()

        return first

    def _step(
        self, variant: verify.Variant, period: int | None, state: torch.Tensor, record: Record,
        tiles: Tiles | None = None,
    ) -> Launch:  # fmt: skip
        method: Any = "replay" if variant == "replay" else "product"
        width = self.shape.nodes if self.paths is None else None

        def launch() -> None:
            verify.gdn_verify(
                **self.inputs, state=state, state_indices=self.slots, cu_nodes=self.cu, record=record,
                record_indices=self.slots, paths=self.paths, out=self.out, variant=variant, width=width, tiles=tiles,
            )  # fmt: skip
            path = None if self.paths is None else self.path
            if period is None:
                commit.gdn_commit(state, self.slots, record, self.slots, path, self.accepted, method=method)
            elif path is not None:
                commit.gdn_compact(record, self.slots, self.slots, path, self.accepted)

        return launch

    def upstream(self, snapshot: Callable[..., Any]) -> Launch:
        """vLLM's kernel, as many tokens in a chain. It commits by choosing a snapshot, at no cost."""
        n, requests = self.shape.nodes, self.shape.requests
        pool = self.states(1 + requests * n)
        slots = 1 + torch.arange(requests * n, dtype=torch.int32, device=self.device).view(requests, n)
        q, k, v = (self.inputs[name].contiguous()[None] for name in "qkv")
        ones = torch.ones(requests, dtype=torch.int32, device=self.device)
        rest = {name: self.inputs[name] for name in ("A_log", "a", "b", "dt_bias")}

        def launch() -> None:
            snapshot(
                **rest, q=q, k=k, v=v, initial_state=pool, inplace_final_state=True, cu_seqlens=self.cu,
                ssm_state_indices=slots, num_accepted_tokens=ones, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip

        return launch

    def copy(self) -> Launch:
        """Read every state once and write it once."""
        state = self.states(self.shape.requests)
        target = torch.empty_like(state)

        def launch() -> None:
            target.copy_(state)

        return launch


def traffic(dims: Dims, shape: Shape) -> dict[str, int]:
    """Return bytes that each way must move per layer, and bytes that it holds per request for a step in flight."""
    n, requests = shape.nodes, shape.requests
    heads = dims.heads * dims.key_dim * 2
    inputs = n * (2 * heads + dims.value_heads * (dims.value_dim * 2 + 4))
    outputs = n * dims.value_heads * dims.value_dim * 2
    row = heads + dims.heads * 4 + dims.value_heads * (dims.value_dim * 4 + 4)
    kept = len(shape.accepted) * row
    fixed = inputs + outputs + n * row
    return {
        "vllm_moved": requests * (inputs + outputs + (n + 1) * dims.state_bytes),
        "commit_moved": requests * (fixed + kept + 3 * dims.state_bytes),
        "fused_moved": requests * (fixed + kept + 2 * dims.state_bytes),
        "not_due_moved": requests * (fixed + kept + dims.state_bytes),
        "vllm_held": n * dims.state_bytes,
        "commit_held": rows_needed(n, path=shape.longest) * row,
        "fused_held": rows_needed(n, path=shape.longest, period=1) * row,
    }
