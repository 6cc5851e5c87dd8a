"""DFlash drafter in plain PyTorch: the definition that the engines' implementations are compared with.

A block is ``[anchor, mask, ..., mask]`` at consecutive positions; the anchor is the last token emitted. One pass
predicts the token *at* every mask slot. Queries see the target's hidden states before the anchor, and their own block,
in both directions. Embedding and head belong to the target. Source: arXiv:2602.06036.

Shapes: B sequences, S context positions, A anchors, L block slots, Q = A * L queries, H hidden, F = layers tapped * H.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShape:
    """Sizes of a drafter and the target layers it reads; ``target_layer_ids`` count layer outputs from 0."""

    vocabulary: int
    hidden: int
    target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 256
    max_length: int = 8192
    rope_theta: float = 1e6
    epsilon: float = 1e-6

    def config(self) -> dict[str, Any]:
        """Return ``config.json`` as vLLM's ``DFlashDraftModel`` reads it."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_length,
            "rms_norm_eps": self.epsilon,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"] * self.layers,
            "block_size": self.block_size,
            "num_target_layers": self.target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "dtype": "bfloat16",
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DrafterShape":
        """Return the shape that ``config.json`` of a full-attention drafter describes."""
        return cls(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            target_layers=config["num_target_layers"],
            target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
            mask_token_id=config["dflash_config"]["mask_token_id"],
            block_size=config["block_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate=config["intermediate_size"],
            max_length=config["max_position_embeddings"],
            rope_theta=config["rope_parameters"]["rope_theta"],
            epsilon=config["rms_norm_eps"],
        )


def block_mask(anchors: Tensor, block: int, context: int) -> Tensor:
    """Return who sees what: [B, Q, S + Q] bool for ``anchors`` [B, A] int64, Q = A * block.

    A query sees the context strictly before its anchor (the target has not computed the anchor's own state when the
    draft is made), and the slots of its own block.
    """
    batch, count = anchors.shape
    owner = torch.arange(count, device=anchors.device).repeat_interleave(block)
    before = torch.arange(context, device=anchors.device) < anchors.repeat_interleave(block, dim=1)[..., None]
    own = (owner[:, None] == owner[None, :]).expand(batch, -1, -1)
    return torch.cat([before, own], dim=2)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary positions to ``x`` [B, N, heads, D] at ``positions`` [B, N]; pairs are (i, i + D/2)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[..., None, None].float() * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Queries from the block; keys and values from the context features and from the block."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.epsilon)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.epsilon)

    def forward(self, x: Tensor, positions: Tensor, context: Tensor, context_positions: Tensor, mask: Tensor) -> Tensor:
        """Return [B, Q, H] from the normed block ``x`` [B, Q, H] and ``context`` [B, S, H]."""
        shape, theta = self.shape, self.shape.rope_theta
        source = torch.cat([context, x], dim=1)
        source_positions = torch.cat([context_positions, positions], dim=1)
        q = self.q_norm(self.q_proj(x).unflatten(-1, (shape.heads, shape.head_dim)))
        k = self.k_norm(self.k_proj(source).unflatten(-1, (shape.kv_heads, shape.head_dim)))
        v = self.v_proj(source).unflatten(-1, (shape.kv_heads, shape.head_dim))
        q, k = rotate(q, positions, theta), rotate(k, source_positions, theta)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask[:, None], enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm block; the context enters attention without this layer's input norm."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)

    def forward(self, x: Tensor, positions: Tensor, context: Tensor, context_positions: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, context, context_positions, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The drafter without the target's embedding and head; ``state_dict`` keys are the checkpoint's."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.target_layer_ids) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)

    def forward(
        self, embedded: Tensor, positions: Tensor, features: Tensor, feature_positions: Tensor, mask: Tensor
    ) -> Tensor:
        """Return hidden states [B, Q, H] for the target's head.

        Args:
            embedded: [B, Q, H], target embeddings of anchors and masks.
            positions: [B, Q] int64.
            features: [B, S, F], outputs of the tapped target layers, concatenated in layer order.
            feature_positions: [B, S] int64.
            mask: [B, Q, S + Q] bool, from ``block_mask``.
        """
        context = self.hidden_norm(self.fc(features))
        x = embedded
        for layer in self.layers:
            x = layer(x, positions, context, feature_positions, mask)
        return self.norm(x)

    def save(self, directory: Path) -> None:
        """Write ``model.safetensors`` in bf16 and ``config.json``."""
        from safetensors.torch import save_file

        tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(self.shape.config(), indent=2) + "\n"
        (directory / "config.json").write_text(text, encoding="utf-8")


def load(directory: Path) -> Drafter:
    """Return the drafter that ``Drafter.save`` or a publisher wrote into ``directory``, in float32."""
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(directory / "model.safetensors")
    drafter: Drafter = Drafter(DrafterShape.from_config(config))
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    drafter.eval()
    return drafter
