"""One layer's worth of convolution, attention and compaction along tree paths, at the dims of Qwen3.5-35B."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from thor_spec.kernels.conv_tree import kernel as conv
from thor_spec.kernels.kv_compact import kernel as compact
from thor_spec.kernels.tree_attention import kernel as attention
from thor_spec.kernels.tree_attention.tiles import Tiles
from thor_spec.kernels.tree_paths.reference import tree_paths

Launch = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Qwen3.5-35B-A3B by default."""

    channels: int = 8192
    taps: int = 4
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    block_size: int = 528
    full_layers: int = 10


@dataclass(slots=True, kw_only=True)
class PathLayer:
    """Buffers of one layer, filled with normal numbers, and the launches over them."""

    dims: Dims
    requests: int
    parents: tuple[int, ...]
    context: int
    device: str
    sms: int
    _tensors: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        d, r, n, device = self.dims, self.requests, len(self.parents), self.device
        blocks = -(-(self.context + n) // d.block_size)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        whole = torch.arange(r + 1, dtype=torch.int32, device=device)
        table = 1 + torch.randperm(r * blocks, device=device).view(r, blocks).to(torch.int32)
        at = self.context + torch.arange(n, device=device)
        parents = torch.tensor(self.parents, dtype=torch.int32, device=device).expand(r, n).contiguous()
        masks = tree_paths(parents, whole * n).masks
        path = [node for node in range(n) if int(masks[0, n - 1]) >> node & 1]
        both = normal(1 + r * blocks, 2, d.block_size, d.kv_heads, d.head_dim)
        self._tensors = {
            "x": normal(r * n, d.channels),
            "weight": normal(d.channels, d.taps),
            "window": normal(1 + r, d.taps - 1, d.channels).transpose(1, 2),
            "inputs": normal(r, n, d.channels),
            "slots_of": whole[1:],
            "records": whole[:-1].contiguous(),
            "parents": parents,
            "cu_nodes": whole * n,
            "path": torch.tensor(path, dtype=torch.int32, device=device).expand(r, len(path)).contiguous(),
            "accepted": torch.full((r,), len(path), dtype=torch.int32, device=device),
            "q": normal(r * n, d.heads, d.head_dim),
            "keys": both[:, 0],
            "values": both[:, 1],
            "table": table,
            "lengths": torch.full((r,), self.context + n, dtype=torch.int32, device=device),
            "masks": masks,
            "slots": (table[:, at // d.block_size].long() * d.block_size + at % d.block_size).flatten(),
        }

    def convolve(self) -> Launch:
        """Convolve all nodes and keep their inputs."""
        t = self._tensors
        out = torch.empty_like(t["x"])
        return lambda: conv.conv_tree(
            t["x"], t["weight"], None, t["window"], t["slots_of"], t["parents"], t["cu_nodes"], width=len(self.parents),
            inputs=t["inputs"], record_indices=t["records"], out=out,
        )  # fmt: skip

    def commit_window(self) -> Launch:
        """Shift the windows over the path to the last node."""
        t = self._tensors
        return lambda: conv.conv_commit(t["window"], t["slots_of"], t["inputs"], t["records"], t["path"], t["accepted"])

    def attend(self, tiles: Tiles | None = None) -> Launch:
        """Attend to the context and along paths; ``tiles``: other ones than a launch would choose."""
        t, d = self._tensors, self.dims
        tiles = tiles or Tiles.choose(
            width=len(self.parents), group=d.heads // d.kv_heads, requests=self.requests, kv_heads=d.kv_heads,
            max_slots=self.context + len(self.parents), sms=self.sms,
        )  # fmt: skip
        out = torch.empty_like(t["q"])
        parts = attention.Parts.allocate(len(out), d.heads, d.head_dim, tiles.splits, self.device)
        return lambda: attention.tree_attention(
            t["q"], t["keys"], t["values"], t["table"], t["lengths"], t["masks"], t["cu_nodes"], scale=d.head_dim**-0.5,
            tiles=tiles, width=len(self.parents), out=out, parts=parts,
        )  # fmt: skip

    def compact(self) -> Launch:
        """Move the entries of the path to the last node, in as many buffers as a model has full-attention layers."""
        t = self._tensors
        buffers = compact.Buffers.of([t["keys"], t["values"]] * self.dims.full_layers)
        return lambda: compact.kv_compact(buffers, t["slots"], t["cu_nodes"], t["path"], t["accepted"])

    def dense(self) -> Launch:
        """The same attention in torch, over keys and values gathered beforehand and a dense mask."""
        t, d, n = self._tensors, self.dims, len(self.parents)
        at = torch.arange(self.context + n, device=self.device)
        slots = t["table"][:, at // d.block_size].long() * d.block_size + at % d.block_size
        flat = [t[name].reshape(-1, d.kv_heads, d.head_dim)[slots].transpose(1, 2) for name in ("keys", "values")]
        group = d.heads // d.kv_heads
        k, v = (cache.repeat_interleave(group, dim=1).contiguous() for cache in flat)
        q = t["q"].view(self.requests, n, d.heads, d.head_dim).transpose(1, 2).contiguous()
        seen = torch.ones(n, self.context + n, dtype=torch.bool, device=self.device)
        seen[:, self.context :] = (t["masks"][0][:, None] >> torch.arange(n, device=self.device)) & 1 != 0
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    @property
    def floor_bytes(self) -> dict[str, int]:
        """Bytes that each launch cannot but move: what it reads once and writes once."""
        d, r, n = self.dims, self.requests, len(self.parents)
        entry = 2 * d.kv_heads * d.head_dim * 2
        moved = sum(node != depth for depth, node in enumerate(self._tensors["path"][0].tolist()))
        return {
            "conv": r * d.channels * 2 * (3 * n + d.taps - 1) + d.channels * d.taps * 2,
            "window": r * d.channels * 2 * 2 * (d.taps - 1),
            "attention": r * (self.context + n) * entry + 2 * r * n * d.heads * d.head_dim * 2,
            "compact": 2 * r * moved * entry * d.full_layers,
        }
