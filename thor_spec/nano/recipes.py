"""The numbers behind each tiny checkpoint: shapes, seeds and training lengths."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRecipe:
    """One target: its shape, the strength of its layers against the embedding, and its training.

    Sizes follow Qwen3 and Qwen3-Next where kernels care: GDN heads of 128, attention heads of 64 (dense) or 256 with a
    quarter of it rotated (hybrid).
    """

    hybrid: bool
    layers: int
    head_dim: int
    seed: int
    hidden: int = 128
    max_length: int = 8192
    rope_theta: float = 1e4
    epsilon: float = 1e-6
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    # GDN layers
    key_heads: int = 2
    value_heads: int = 4
    linear_head_dim: int = 128
    conv_kernel: int = 4
    # Experts, in every layer of a hybrid. A token takes all of them: with fewer, two ways of computing the same router
    # logits may choose differently, and the answers of a model this small then jump by more than bf16 explains.
    experts: int = 4
    experts_per_token: int = 4
    expert_intermediate: int = 64
    # RMS of what a fresh layer adds to a residual stream of RMS 1
    gdn_strength: float = 0.25
    attention_strength: float = 0.5
    mlp_strength: float = 0.15
    # Training: ``batch`` windows of ``window`` bytes a step
    steps: int = 40
    batch: int = 2
    window: int = 192
    learning_rate: float = 6e-3

    def layer_types(self) -> list[str]:
        """Return the mixer of each layer: three GDN layers for every attention layer, as in Qwen3-Next."""
        if not self.hybrid:
            return ["full_attention"] * self.layers
        return ["full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(self.layers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterPlan:
    """Training of a drafter on ``generated`` greedy continuations of its target and ``quoted`` pieces of the corpus.

    All have ``prompt + new`` tokens. A step takes ``batch`` of them, with ``anchors`` random blocks in each.
    """

    seed: int
    generated: int = 12
    quoted: int = 100
    prompt: int = 40
    new: int = 56
    steps: int = 200
    batch: int = 10
    anchors: int = 4
    learning_rate: float = 5e-3
    gamma: float = 7.0  # for blocks of 16 (arXiv:2602.06036)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRecipe:
    """One drafter: the target it belongs to, the target layers it reads, its attention and its training."""

    target: str
    target_layer_ids: tuple[int, ...]
    kv_heads: int
    plan: DrafterPlan
    # Many heads: each slot of a block must find the anchor and its neighbours by position, and learns it head by head.
    heads: int = 8
    head_dim: int = 64


# The drafters' keys and values take as many bytes a token as their targets': an engine that lays both out in pages of
# one size then needs no padding.
TARGETS = {
    "tiny-hybrid": TargetRecipe(hybrid=True, layers=4, head_dim=256, seed=7, attention_strength=0.8),
    "tiny-dense": TargetRecipe(hybrid=False, layers=3, head_dim=64, seed=7, batch=4),
}
DRAFTERS = {
    "tiny-hybrid-dflash": DrafterRecipe(
        target="tiny-hybrid", target_layer_ids=(0, 2, 3), kv_heads=8, plan=DrafterPlan(seed=11)
    ),
    "tiny-dense-dflash": DrafterRecipe(
        target="tiny-dense", target_layer_ids=(0, 1, 2), kv_heads=2, plan=DrafterPlan(seed=11)
    ),
}
