"""Seeded inputs for the GDN kernels, and the slowest obvious version of what they compute.

Shapes: R requests, T nodes, H key heads, HV value heads, K key dim, V value dim, W nodes of the largest tree.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from thor_spec.kernels.gdn_common.record import Record, rows_needed
from thor_spec.kernels.tree_paths.reference import TreePaths, tree_paths

Parents = list[int]


def chain(n: int) -> Parents:
    return list(range(-1, n - 1))


def star(n: int) -> Parents:
    return [-1] + [0] * (n - 1)


def comb(n: int) -> Parents:
    """A spine with one tooth at each vertebra: 0 - 1, 0 - 2 - 3, 2 - 4 ..."""
    return [-1] + [2 * ((t - 1) // 2) for t in range(1, n)]


def full(widths: Sequence[int]) -> Parents:
    """Level by level, every node of a level with the same number of children."""
    parents, level = [-1], [0]
    for width in widths:
        children = []
        for node in level:
            for _ in range(width):
                children.append(len(parents))
                parents.append(node)
        level = children
    return parents


def random_tree(n: int, seed: int) -> Parents:
    rng = random.Random(seed)
    return [-1] + [rng.randrange(max(0, t - 6), t) for t in range(1, n)]


def depth_first(parents: Parents) -> Parents:
    """The same tree with its nodes renumbered in depth-first pre-order."""
    order: list[int] = []
    stack = [t for t, p in enumerate(parents) if p < 0][::-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += [t for t, p in enumerate(parents) if p == node][::-1]
    place = {node: i for i, node in enumerate(order)}
    return [place.get(parents[node], -1) for node in order]


def path_to(parents: Parents, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@dataclass
class Case:
    """Arguments of ``gdn_verify`` for a batch, all tensors its own."""

    parents: list[Parents]
    args: dict[str, Any]
    tree: bool
    counts: list[int]

    @property
    def record(self) -> Record:
        record: Record = self.args["record"]
        return record

    @property
    def state(self) -> torch.Tensor:
        state: torch.Tensor = self.args["state"]
        return state

    def copy(self) -> "Case":
        def clone(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.clone(memory_format=torch.preserve_format)
            if isinstance(value, Record):
                fields = {name: clone(getattr(value, name)) for name in Record.__dataclass_fields__}
                return Record(**fields)
            return value

        return replace(self, args={name: clone(value) for name, value in self.args.items()})

    def in_float64(self) -> "Case":
        """The same values, with everything accumulated in float64."""
        case = self.copy()
        for name, value in case.args.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                case.args[name] = value.double()
        old = case.record
        widened = {
            name: value.double()
            if isinstance(value := getattr(old, name), torch.Tensor) and value.is_floating_point()
            else value
            for name in Record.__dataclass_fields__
        }
        case.args["record"] = Record(**widened)
        return case

    def to(self, device: str) -> "Case":
        case = self.copy()
        for name, value in case.args.items():
            if isinstance(value, torch.Tensor):
                case.args[name] = value.to(device)
            elif isinstance(value, Record):
                moved = {
                    field: None if getattr(value, field) is None else getattr(value, field).to(device)
                    for field in Record.__dataclass_fields__
                }
                case.args[name] = Record(**moved)
            elif isinstance(value, TreePaths):
                case.args[name] = TreePaths(masks=value.masks.to(device), leaves=value.leaves.to(device))
        return case


def make(
    parents: list[Parents],
    *,
    seed: int = 0,
    heads: int = 1,
    value_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    state_dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float32,
    tree: bool = True,
    padding: Sequence[int] = (),
    per_channel: bool = False,
    deferred: bool = False,
    period: int = 1,
    has_beta: bool = True,
    decays: Callable[[torch.Tensor], torch.Tensor] | None = None,
    betas: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Case:
    """A batch with one request per tree; those in ``padding`` are padding rows. Slot 0 is never anybody's."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    requests, counts = len(parents), [len(p) for p in parents]
    tokens, width = sum(counts), max(counts)
    # q, k and v are views of one wide row, as a projection leaves them; what is beside them is NaN.
    sizes = (heads * key_dim, heads * key_dim, value_heads * value_dim)
    wide = torch.full((tokens, sum(sizes) + 16), torch.nan, dtype=dtype)
    offset, views = 0, []
    for size, last in zip(sizes, (key_dim, key_dim, value_dim), strict=True):
        view = wide[:, offset : offset + size].unflatten(1, (-1, last))
        view.copy_(normal(*view.shape))
        views.append(view)
        offset += size
    a = normal(tokens, value_heads, key_dim) if per_channel else normal(tokens, value_heads)
    b = normal(tokens, value_heads)
    slots = requests + 2
    state = normal(slots, value_heads, value_dim, key_dim).to(state_dtype)
    order = torch.randperm(slots - 1, generator=g)[:requests] + 1
    order[list(padding)] = 0
    rows = rows_needed(width, path=width, period=period if deferred else None)
    record = Record.allocate(
        slots=requests + 1, rows=rows, heads=heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim,
        dtype=dtype, device="cpu", per_channel=per_channel, deferred=deferred,
    )  # fmt: skip
    cu = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    table = torch.full((requests, width), -7, dtype=torch.int32)
    for r, tree_parents in enumerate(parents):
        table[r, : counts[r]] = torch.tensor(tree_parents, dtype=torch.int32)
    dt_bias = normal(value_heads, key_dim) if per_channel else normal(value_heads)
    args = {
        "q": views[0], "k": views[1], "v": views[2],
        "a": (decays(a) if decays else a).to(gate_dtype),
        "b": (betas(b) if betas else b).to(gate_dtype) if has_beta else None,
        "A_log": normal(value_heads) * 0.5, "dt_bias": dt_bias, "state": state,
        "state_indices": order.to(torch.int32), "cu_nodes": cu, "record": record,
        "record_indices": torch.randperm(requests + 1, generator=g)[:requests].to(torch.int32),
        "paths": tree_paths(table, cu) if tree else None,
    }  # fmt: skip
    return Case(parents=parents, args=args, tree=tree, counts=counts)


def sequential(case: Case, *, delta: bool = True, l2_norm: bool = True) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Decode every root-to-node path from the committed state, one token after the other, in float64.

    Returns: outputs [T, HV, V]; per request the states after each node [count, HV, V, K].
    """
    x = {name: value.double() for name, value in case.args.items() if isinstance(value, torch.Tensor)}
    heads, key_dim = case.args["k"].shape[1:]
    group = case.args["v"].shape[1] // heads
    out = torch.full(case.args["v"].shape, torch.nan, dtype=torch.float64)
    states = []
    for r, slot in enumerate(case.args["state_indices"].tolist()):
        bos = int(case.args["cu_nodes"][r])
        after = []
        for node in range(case.counts[r] if slot > 0 else 0):
            s = x["state"][slot].clone()
            for t in path_to(case.parents[r], node):
                q, k = x["q"][bos + t], x["k"][bos + t]
                if l2_norm:
                    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
                    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
                q, k = (z.repeat_interleave(group, dim=0) for z in (q * key_dim**-0.5, k))
                pre = x["a"][bos + t] + x["dt_bias"]
                softplus = torch.where(pre > 20, pre, torch.log1p(pre.clamp(max=20).exp()))
                A = x["A_log"].exp()
                alpha = (-(A[:, None] if softplus.dim() == 2 else A) * softplus).exp()
                s = s * (alpha[:, None, :] if alpha.dim() == 2 else alpha[:, None, None])
                u = x["v"][bos + t]
                if delta:
                    u = u - torch.einsum("hvk,hk->hv", s, k)
                if "b" in x:
                    u = u * torch.sigmoid(x["b"][bos + t])[:, None]
                s = s + u[:, :, None] * k[:, None, :]
                if t == node:
                    out[bos + t] = torch.einsum("hvk,hk->hv", s, q)
            after.append(s)
        states.append(torch.stack(after) if after else torch.empty(0))
    return out, states
