"""Qwen3-Next for training: the published architecture, with chunked GDN layers and experts computed all at once.

``save`` writes the layout that transformers and vLLM load. The same module writes text in batches from its caches.

Shapes: B sequences, T tokens, D hidden.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thor_spec.train import delta
from thor_spec.train.layers import MLP, Experts, Norm, initialize, rotary_angles, rotate
from thor_spec.train.shapes import HybridShape, Marks


@dataclass
class Cache:
    """What a model remembers of B sequences of one length; ``room`` bounds that length."""

    room: int
    length: int = 0
    windows: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)


class GatedDeltaNet(nn.Module):
    """A GDN layer; the rows of its projections are grouped by key head, as in the checkpoints."""

    def __init__(self, shape: HybridShape, layer: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        width = 2 * shape.key_size + shape.value_size
        self.in_proj_qkvz = nn.Linear(shape.hidden, width + shape.value_size, bias=False)
        self.in_proj_ba = nn.Linear(shape.hidden, 2 * shape.value_heads, bias=False)
        self.conv1d = nn.Module()
        self.conv1d.weight = nn.Parameter(torch.empty(width, 1, shape.conv_kernel).uniform_(-0.5, 0.5))
        self.A_log = nn.Parameter(torch.empty(shape.value_heads).uniform_(1, 16).log())
        # Steps from 0.001 to 0.1 on a log scale, through the inverse of softplus: memories of one to a thousand tokens.
        step = torch.exp(torch.empty(shape.value_heads).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = Norm(shape.linear_head_dim, shape.epsilon)
        self.out_proj = nn.Linear(shape.value_size, shape.hidden, bias=False)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        shape, size = self.shape, self.shape.linear_head_dim
        per_key = shape.value_heads // shape.key_heads
        grouped = self.in_proj_qkvz(x).unflatten(-1, (shape.key_heads, -1))
        q, k, v, z = grouped.split([size, size, per_key * size, per_key * size], dim=-1)
        b, a = self.in_proj_ba(x).unflatten(-1, (shape.key_heads, -1)).chunk(2, dim=-1)
        mixed = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1)
        window = cache.windows.get(self.layer) if cache else None
        convolved = delta.convolve(mixed, self.conv1d.weight[:, 0], window)
        q, k, v = convolved.float().split([shape.key_size, shape.key_size, shape.value_size], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, size)) for part in (q, k, v))
        q, k = (part * torch.rsqrt(part.square().sum(dim=-1, keepdim=True) + 1e-6) for part in (q, k))
        q, k = (part.repeat_interleave(per_key, dim=2) for part in (q * size**-0.5, k))
        beta = b.flatten(2).float().sigmoid()
        log_decay = -self.A_log.float().exp() * functional.softplus(a.flatten(2).float() + self.dt_bias)
        state = cache.states.get(self.layer) if cache else None
        if state is None:
            state = q.new_zeros(q.shape[0], shape.value_heads, size, size)
        rule = delta.recurrent if x.shape[1] == 1 else delta.chunked
        with torch.autocast(x.device.type, enabled=False):
            out, state = rule(q, k, v, log_decay, beta, state)
        if cache:
            before = (
                mixed.new_zeros(mixed.shape[0], shape.conv_kernel - 1, mixed.shape[2]) if window is None else window
            )
            cache.windows[self.layer] = torch.cat([before, mixed], dim=1)[:, 1 - shape.conv_kernel :]
            cache.states[self.layer] = state
        gated = self.norm(out) * functional.silu(z.reshape(out.shape).float())
        return self.out_proj(gated.flatten(2).to(x.dtype))


class Attention(nn.Module):
    """Causal attention with an output gate."""

    def __init__(self, shape: HybridShape, layer: int) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        self.q_proj = nn.Linear(shape.hidden, 2 * shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.epsilon, offset=1.0)
        self.k_norm = Norm(shape.head_dim, shape.epsilon, offset=1.0)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        shape, tokens = self.shape, x.shape[1]
        begin = cache.length if cache else 0
        q, gate = self.q_proj(x).unflatten(-1, (shape.heads, -1)).chunk(2, dim=-1)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (shape.kv_heads, -1)))
        v = self.v_proj(x).unflatten(-1, (shape.kv_heads, -1))
        positions = torch.arange(begin, begin + tokens, device=x.device)
        angles = rotary_angles(positions, int(shape.head_dim * shape.rotary), shape.rope_theta)
        q, k = rotate(self.q_norm(q), *angles), rotate(k, *angles)
        if cache:
            if self.layer not in cache.keys:
                cache.keys[self.layer] = k.new_zeros(k.shape[0], cache.room, *k.shape[2:])
                cache.values[self.layer] = torch.zeros_like(cache.keys[self.layer])
            for kept, new in ((cache.keys, k), (cache.values, v)):
                kept[self.layer][:, begin : begin + tokens] = new
            k, v = (kept[self.layer][:, : begin + tokens] for kept in (cache.keys, cache.values))
        q, k, v = (part.transpose(1, 2).to(x.dtype) for part in (q, k, v))
        causal = begin == 0 and tokens > 1
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return self.o_proj((out.transpose(1, 2) * gate.sigmoid()).flatten(2))


class SparseMLP(nn.Module):
    """Routed experts and a gated shared one. ``loads`` keeps what the balance loss needs of the last forward."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = Experts(shape.hidden, shape.experts, shape.expert_intermediate)
        self.shared_expert = MLP(shape.hidden, shape.shared_intermediate)
        self.shared_expert_gate = nn.Linear(shape.hidden, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the balance loss: 1 when all experts are chosen equally often."""
        with torch.autocast(x.device.type, enabled=False):
            scores = functional.linear(x.float(), self.gate.weight.float()).softmax(dim=-1)
        best, chosen = scores.topk(self.shape.experts_per_token, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best / best.sum(dim=-1, keepdim=True))
        share = (weights > 0).float().mean(dim=(0, 1)) / self.shape.experts_per_token
        balance = self.shape.experts * (share * scores.mean(dim=(0, 1))).sum()
        shared = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return self.experts(x, weights) + shared, balance


class Layer(nn.Module):
    """Mixer and experts, each behind its norm."""

    def __init__(self, shape: HybridShape, layer: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.epsilon, offset=1.0)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon, offset=1.0)
        self.is_attention = shape.is_attention(layer)
        if self.is_attention:
            self.self_attn = Attention(shape, layer)
        else:
            self.linear_attn = GatedDeltaNet(shape, layer)
        self.mlp = SparseMLP(shape)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Tensor]:
        mixer = self.self_attn if self.is_attention else self.linear_attn
        x = x + mixer(self.input_layernorm(x), cache)
        out, balance = self.mlp(self.post_attention_layernorm(x))
        return x + out, balance


class Hybrid(nn.Module):
    """The whole model."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList([Layer(shape, layer) for layer in range(shape.layers)])
        self.norm = Norm(shape.hidden, shape.epsilon, offset=1.0)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        initialize(self, shape.layers)

    def forward(
        self, ids: Tensor, cache: Cache | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return final hidden states [B, T, D], outputs of the layers ``taps`` [B, T, len(taps) * D], balance loss."""
        x = self.embed_tokens(ids)
        balances, tapped = [], []
        for index, layer in enumerate(self.layers):
            x, balance = layer(x, cache)
            balances.append(balance)
            if index in taps:
                tapped.append(x)
        if cache:
            cache.length += ids.shape[1]
        features = torch.cat(tapped, dim=-1) if tapped else x[..., :0]
        return self.norm(x), features, torch.stack(balances).mean()

    def logits(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Return [B, T, V]."""
        return self.lm_head(self(ids, cache)[0])

    def export(self) -> dict[str, Tensor]:
        """Return the weights under their published names."""
        tensors = {}
        for name, tensor in self.state_dict().items():
            if ".experts." not in name:
                tensors[name if name.startswith("lm_head") else f"model.{name}"] = tensor
        for index, layer in enumerate(self.layers):
            tensors |= layer.mlp.experts.export(f"model.layers.{index}.mlp.experts.")
        return tensors

    def save(self, directory: Path, marks: Marks) -> None:
        """Write weights in bf16 and configurations; the tokenizer is the caller's."""
        from safetensors.torch import save_file

        tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in self.export().items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        generation = {"bos_token_id": None, "eos_token_id": [marks.turn_end, marks.end], "pad_token_id": marks.end}
        contents = {"config.json": self.shape.config(marks), "generation_config.json": generation}
        for name, content in contents.items():
            (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(directory: Path) -> Hybrid:
    """Return the model that ``Hybrid.save`` wrote, in float32."""
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model: Hybrid = Hybrid(HybridShape.from_config(config))
    tensors = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
    for index, layer in enumerate(model.layers):
        layer.mlp.experts.take(f"model.layers.{index}.mlp.experts.", tensors)
    own = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(own, strict=False)
    if unexpected or any(".experts." not in name for name in missing):
        raise ValueError(f"{directory} does not hold this architecture: missing {missing}, unexpected {unexpected}")
    model.eval()
    return model
