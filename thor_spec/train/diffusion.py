"""LLaDA2 for training: block-causal attention, grouped experts with a selection bias, the published weight names.

Logit i predicts the token at position i. Attention is full inside a block of ``block`` tokens and causal over blocks.

Shapes: B sequences, T tokens, D hidden, E experts.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from thor_spec.train.layers import MLP, Experts, Norm, initialize, rotary_angles, rotate
from thor_spec.train.shapes import DiffusionShape, Marks


class Attention(nn.Module):
    """Attention over whatever the mask allows."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__()
        self.shape = shape
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.query_key_value = nn.Linear(shape.hidden, width, bias=False)
        self.query_layernorm = Norm(shape.head_dim, shape.epsilon)
        self.key_layernorm = Norm(shape.head_dim, shape.epsilon)
        self.dense = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        shape = self.shape
        heads = self.query_key_value(x).unflatten(-1, (-1, shape.head_dim))
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=-2)
        angles = rotary_angles(positions, int(shape.head_dim * shape.rotary), shape.rope_theta)
        q, k = rotate(self.query_layernorm(q), *angles), rotate(self.key_layernorm(k), *angles)
        # Repeated by hand: the fused kernels that take a mask know no grouped queries.
        k, v = (part.repeat_interleave(shape.heads // shape.kv_heads, dim=-2) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.dense(out.transpose(1, 2).flatten(2))


class Gate(nn.Module):
    """Chooses experts: sigmoid scores plus a bias decide, the scores alone weigh."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.register_buffer("expert_bias", torch.zeros(shape.experts))
        self.register_buffer("load", torch.zeros(shape.experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return weights [B, T, E] float32, zero for the experts not chosen."""
        shape = self.shape
        with torch.autocast(x.device.type, enabled=False):
            scores = functional.linear(x.float(), self.weight.float()).sigmoid()
        biased = (scores + self.expert_bias).unflatten(-1, (shape.groups, -1))
        # A group is as good as its two best experts.
        best = biased.topk(min(2, biased.shape[-1]), dim=-1).values.sum(dim=-1).topk(shape.groups_per_token, dim=-1)
        open_groups = torch.zeros_like(biased[..., 0]).scatter(-1, best.indices, 1.0).bool()
        chosen = (
            biased.masked_fill(~open_groups[..., None], -torch.inf).flatten(-2).topk(shape.experts_per_token, dim=-1)
        )
        weights = torch.zeros_like(scores).scatter(-1, chosen.indices, scores.gather(-1, chosen.indices))
        if self.training:
            with torch.no_grad():
                self.load += (weights > 0).float().sum(dim=(0, 1))
        return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * shape.routed_scale

    @torch.no_grad()
    def rebalance(self, rate: float) -> None:
        """Raise the bias of experts that were chosen too seldom since the last call, lower that of the others."""
        self.expert_bias += rate * torch.sign(self.load.mean() - self.load)
        self.expert_bias -= self.expert_bias.mean()
        self.load.zero_()


class SparseMLP(nn.Module):
    """Routed experts and the shared one."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__()
        self.gate = Gate(shape)
        self.experts = Experts(shape.hidden, shape.experts, shape.expert_intermediate)
        self.shared_experts = MLP(shape.hidden, shape.shared_experts * shape.expert_intermediate)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x)) + self.shared_experts(x)


class Layer(nn.Module):
    """Attention and MLP, each behind its norm."""

    def __init__(self, shape: DiffusionShape, layer: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.attention = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)
        is_dense = layer < shape.dense_layers
        self.mlp = MLP(shape.hidden, shape.intermediate) if is_dense else SparseMLP(shape)

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), positions, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Diffusion(nn.Module):
    """The whole model."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__()
        self.shape = shape
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList([Layer(shape, layer) for layer in range(shape.layers)])
        self.norm = Norm(shape.hidden, shape.epsilon)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        initialize(self, shape.layers)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, count: int | None = None) -> Tensor:
        """Return logits of the first ``count`` tokens (or all), [B, count, V].

        Args:
            ids: [B, T] int64.
            positions: [T] int64.
            mask: [T, T] bool: who sees whom.
        """
        x = self.word_embeddings(ids)
        for layer in self.layers:
            x = layer(x, positions, mask)
        return self.lm_head(self.norm(x[:, :count]))

    def rebalance(self, rate: float) -> None:
        """Move the selection bias of every layer towards equal loads."""
        for layer in self.layers[self.shape.dense_layers :]:
            layer.mlp.gate.rebalance(rate)

    def export(self) -> dict[str, Tensor]:
        """Return the weights under their published names."""
        tensors = {}
        for name, tensor in self.state_dict().items():
            if ".mlp.experts." not in name:
                tensors[name if name.startswith("lm_head") else f"model.{name}"] = tensor
        for index, layer in enumerate(self.layers):
            if index >= self.shape.dense_layers:
                tensors |= layer.mlp.experts.export(f"model.layers.{index}.mlp.experts.")
        return tensors

    def save(self, directory: Path, marks: Marks) -> None:
        """Write weights (bf16; the selection bias in float32, as published) and configuration."""
        from safetensors.torch import save_file

        tensors = {
            name: tensor.to("cpu", torch.float32 if name.endswith("expert_bias") else torch.bfloat16).contiguous()
            for name, tensor in self.export().items()
        }
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(self.shape.config(marks), indent=2) + "\n"
        (directory / "config.json").write_text(text, encoding="utf-8")


def load(directory: Path) -> Diffusion:
    """Return the model that ``Diffusion.save`` wrote, in float32."""
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model: Diffusion = Diffusion(DiffusionShape.from_config(config))
    tensors = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
    for index, layer in enumerate(model.layers):
        if index >= model.shape.dense_layers:
            layer.mlp.experts.take(f"model.layers.{index}.mlp.experts.", tensors)
    own = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(own, strict=False)
    if unexpected or any(".mlp.experts." not in name for name in missing):
        raise ValueError(f"{directory} does not hold this architecture: missing {missing}, unexpected {unexpected}")
    model.eval()
    return model
