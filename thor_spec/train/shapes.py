"""Sizes of the nano models, and the configurations that transformers and vLLM read."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Ids of the tokens that have a meaning of their own."""

    end: int
    """End of a text; also the padding."""
    turn_end: int
    mask: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridShape:
    """A Qwen3-Next model: three GDN layers for every attention layer, experts in each."""

    vocabulary: int
    hidden: int = 256
    layers: int = 8
    key_heads: int = 2
    value_heads: int = 4
    linear_head_dim: int = 128
    conv_kernel: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    rotary: float = 0.5
    rope_theta: float = 1e5
    experts: int = 8
    experts_per_token: int = 4
    expert_intermediate: int = 32
    shared_intermediate: int = 96
    max_length: int = 8192
    epsilon: float = 1e-6

    @property
    def key_size(self) -> int:
        """Return the width of all key heads of a GDN layer."""
        return self.key_heads * self.linear_head_dim

    @property
    def value_size(self) -> int:
        """Return the width of all value heads of a GDN layer."""
        return self.value_heads * self.linear_head_dim

    def is_attention(self, layer: int) -> bool:
        """Return whether ``layer`` is one of full attention."""
        return layer % 4 == 3

    def products_per_token(self) -> int:
        """Return multiply-adds a token, head included, attention over the context not (``DrafterShape`` likewise)."""
        gdn = self.hidden * (2 * self.key_size + 3 * self.value_size + 2 * self.value_heads)
        gdn += 4 * self.value_size * self.linear_head_dim  # decay, recall, write, read
        attention = self.hidden * self.head_dim * (3 * self.heads + 2 * self.kv_heads)
        used = self.experts_per_token * self.expert_intermediate + self.shared_intermediate
        experts = self.hidden * (3 * used + self.experts + 1)
        full = sum(map(self.is_attention, range(self.layers)))
        total = (self.layers - full) * gdn + full * attention + self.layers * experts
        return total + self.hidden * self.vocabulary

    def config(self, marks: Marks) -> dict[str, Any]:
        """Return ``config.json``."""
        kinds = ["full_attention" if self.is_attention(i) else "linear_attention" for i in range(self.layers)]
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_length,
            "initializer_range": 0.02,
            "rms_norm_eps": self.epsilon,
            "use_cache": True,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": kinds,
            "bos_token_id": None,
            "eos_token_id": marks.turn_end,
            "pad_token_id": marks.end,
            "dtype": "bfloat16",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary,
            },
            "linear_conv_kernel_dim": self.conv_kernel,
            "linear_key_head_dim": self.linear_head_dim,
            "linear_value_head_dim": self.linear_head_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "norm_topk_prob": True,
            "moe_intermediate_size": self.expert_intermediate,
            "shared_expert_intermediate_size": self.shared_intermediate,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "HybridShape":
        """Return the shape that a ``config.json`` written by ``config`` describes."""
        return cls(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            key_heads=config["linear_num_key_heads"],
            value_heads=config["linear_num_value_heads"],
            linear_head_dim=config["linear_key_head_dim"],
            conv_kernel=config["linear_conv_kernel_dim"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rotary=config["rope_parameters"]["partial_rotary_factor"],
            rope_theta=config["rope_parameters"]["rope_theta"],
            experts=config["num_experts"],
            experts_per_token=config["num_experts_per_tok"],
            expert_intermediate=config["moe_intermediate_size"],
            shared_intermediate=config["shared_expert_intermediate_size"],
            max_length=config["max_position_embeddings"],
            epsilon=config["rms_norm_eps"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionShape:
    """A LLaDA2 model: block-causal attention, a dense first layer, grouped experts with a shared one."""

    vocabulary: int
    hidden: int = 128
    layers: int = 5
    dense_layers: int = 1
    intermediate: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary: float = 0.5
    rope_theta: float = 1e5
    experts: int = 16
    experts_per_token: int = 4
    shared_experts: int = 1
    expert_intermediate: int = 32
    groups: int = 4
    groups_per_token: int = 2
    routed_scale: float = 2.5
    block: int = 32
    max_length: int = 2048
    epsilon: float = 1e-6

    def config(self, marks: Marks) -> dict[str, Any]:
        """Return ``config.json`` with the fields of the published checkpoints."""
        return {
            "architectures": ["LLaDA2MoeModelLM"],
            "model_type": "llada2_moe",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "use_bias": False,
            "use_qkv_bias": False,
            "use_qk_norm": True,
            "norm_head": False,
            "tie_word_embeddings": False,
            "rms_norm_eps": self.epsilon,
            "embedding_dropout": 0.0,
            "attention_dropout": 0.0,
            "output_dropout": 0.0,
            "initializer_range": 0.02,
            "max_position_embeddings": self.max_length,
            "max_window_layers": self.layers,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "partial_rotary_factor": self.rotary,
            "use_cache": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "num_experts": self.experts,
            "num_shared_experts": self.shared_experts,
            "num_experts_per_tok": self.experts_per_token,
            "n_group": self.groups,
            "topk_group": self.groups_per_token,
            "moe_intermediate_size": self.expert_intermediate,
            "first_k_dense_replace": self.dense_layers,
            "routed_scaling_factor": self.routed_scale,
            "score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "norm_topk_prob": True,
            "router_dtype": "fp32",
            "output_router_logits": False,
            "block_length": self.block,
            "eos_token_id": marks.turn_end,
            "pad_token_id": marks.end,
            "mask_token_id": marks.mask,
            "dtype": "bfloat16",
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DiffusionShape":
        """Return the shape that a ``config.json`` of this layout describes."""
        return cls(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            dense_layers=config["first_k_dense_replace"],
            intermediate=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rotary=config["partial_rotary_factor"],
            rope_theta=config["rope_theta"],
            experts=config["num_experts"],
            experts_per_token=config["num_experts_per_tok"],
            shared_experts=config["num_shared_experts"],
            expert_intermediate=config["moe_intermediate_size"],
            groups=config["n_group"],
            groups_per_token=config["topk_group"],
            routed_scale=config["routed_scaling_factor"],
            block=config.get("block_length", 32),
            max_length=config["max_position_embeddings"],
            epsilon=config["rms_norm_eps"],
        )
