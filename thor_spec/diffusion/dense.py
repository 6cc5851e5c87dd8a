"""LLaDA2 in plain torch over a published checkpoint's own tensors: every expert of every token by itself, no kernel.

Shapes: T tokens of a block, S settled tokens, D hidden, H heads, G key-value heads, E experts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from thor_spec.diffusion import layout


@dataclass(slots=True)
class Cache:
    """Keys and values of settled tokens: per layer ``[S, G, head_dim]``."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Dense:
    """The model. It computes in the dtype of its tensors, and the router in float32 as published."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors
        self.heads, self.kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        self.head_dim = int(config.get("head_dim") or config["hidden_size"] // self.heads)
        rope = config.get("rope_parameters") or config
        self.theta = float(rope["rope_theta"])
        self.rotary = int(self.head_dim * float(rope.get("partial_rotary_factor", 1.0)))
        self.block, self.mask = layout.block_of(config), layout.mask_of(config)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> "Dense":
        """Return the model of a checkpoint folder; the selection bias stays in float32."""
        from safetensors.torch import load_file

        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file, device=device)
        wanted = {name: t.float() if name.endswith("expert_bias") else t.to(dtype) for name, t in tensors.items()}
        return cls(config, wanted)

    def forward(self, ids: Tensor, settled: Cache) -> tuple[Tensor, Cache]:
        """Return logits [T, V] of a block ``ids`` [T] int64 behind settled ones, and the cache with the block in it."""
        start, cache = len(settled.keys[0]) if settled.keys else 0, Cache()
        positions = torch.arange(start, start + len(ids), device=ids.device)
        x = functional.embedding(ids, self.tensors["model.word_embeddings.weight"])
        for layer in range(int(self.config["num_hidden_layers"])):
            name = f"model.layers.{layer}."
            x = x + self._attention(self._norm(x, f"{name}input_layernorm"), positions, layer, settled, cache)
            x = x + self._mlp(self._norm(x, f"{name}post_attention_layernorm"), layer)
        return self._linear(self._norm(x, "model.norm"), "lm_head"), cache

    def decoder(self) -> "Decoder":
        """Return what ``decoding.decode`` calls."""
        return Decoder(self)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, epsilon = self.tensors[f"{name}.weight"], float(self.config["rms_norm_eps"])
        wide = x.float()
        return (weight.float() * wide * (wide.square().mean(dim=-1, keepdim=True) + epsilon).rsqrt()).to(x.dtype)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.rotary // 2
        frequency = self.theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angle = positions[:, None, None].float() * frequency
        first, second, rest = x[..., :half].float(), x[..., half : self.rotary].float(), x[..., self.rotary :]
        turned = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
        return torch.cat([*(part.to(x.dtype) for part in turned), rest], dim=-1)

    def _attention(self, x: Tensor, positions: Tensor, layer: int, settled: Cache, cache: Cache) -> Tensor:
        name = f"model.layers.{layer}.attention."
        heads = self._linear(x, f"{name}query_key_value").unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=-2)
        q = self._rotate(self._norm(q, f"{name}query_layernorm"), positions)
        k = self._rotate(self._norm(k, f"{name}key_layernorm"), positions)
        if settled.keys:
            k, v = torch.cat([settled.keys[layer], k]), torch.cat([settled.values[layer], v])
        cache.keys.append(k)
        cache.values.append(v)
        shared = self.heads // self.kv_heads
        k, v = (part.repeat_interleave(shared, dim=-2).transpose(0, 1) for part in (k, v))
        scores = torch.matmul(q.transpose(0, 1), k.transpose(1, 2)).float() * self.head_dim**-0.5  # [H, T, S + T]
        out = torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)
        return self._linear(out.transpose(0, 1).flatten(1), f"{name}dense")

    def _swiglu(self, x: Tensor, name: str) -> Tensor:
        inner = functional.silu(self._linear(x, f"{name}gate_proj")) * self._linear(x, f"{name}up_proj")
        return self._linear(inner, f"{name}down_proj")

    def _mlp(self, x: Tensor, layer: int) -> Tensor:
        name = f"model.layers.{layer}.mlp."
        if layer < int(self.config["first_k_dense_replace"]):
            return self._swiglu(x, name)
        weights = self._route(x, name)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in weights.sum(dim=0).nonzero().flatten().tolist():
            rows = weights[:, expert].nonzero().flatten()
            out[rows] += weights[rows, expert, None] * self._swiglu(x[rows], f"{name}experts.{expert}.").float()
        out = out.to(x.dtype)
        return out + self._swiglu(x, f"{name}shared_experts.") if self.config["num_shared_experts"] else out

    def _route(self, x: Tensor, name: str) -> Tensor:
        """Return weights [T, E] float32: scores plus bias choose, first groups by their two best, then experts."""
        config = self.config
        scores = functional.linear(x.float(), self.tensors[f"{name}gate.weight"].float()).sigmoid()
        biased = (
            scores + self.tensors[f"{name}gate.expert_bias"] if f"{name}gate.expert_bias" in self.tensors else scores
        )
        grouped = biased.unflatten(-1, (int(config["n_group"]), -1))
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        allowed = torch.zeros_like(best, dtype=torch.bool)
        allowed.scatter_(-1, best.topk(int(config["topk_group"]), dim=-1).indices, value=True)
        open_only = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
        chosen = open_only.topk(int(config["num_experts_per_tok"]), dim=-1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if config.get("norm_topk_prob", True):
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * float(config["routed_scaling_factor"])


class Decoder:
    """A model at the end of one text, as ``decoding.decode`` wants it."""

    def __init__(self, model: Dense) -> None:
        self._model, self._settled, self._last = model, Cache(), Cache()

    @torch.no_grad()
    def __call__(self, block: Sequence[int]) -> Tensor:
        """Return logits [T, V]."""
        ids = torch.tensor(list(block), device=self._model.tensors["lm_head.weight"].device)
        logits, self._last = self._model.forward(ids, self._settled)
        return logits

    def keep(self) -> None:
        """Settle the last block."""
        self._settled = self._last
