"""Tiny target models before their short training: bigram statistics in embedding and head, random layers between.

Without its layers, such a target would write the likeliest next byte after each byte. The layers perturb that choice,
and some forty training steps (``fit``) turn the perturbation into a memory of the corpus; from a plain random start the
same takes several times as many. The memory is left imperfect on purpose: a model that knows its text too well would
shrug off a corrupted state, and tests need one that does not.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thor_spec.nano import corpus, tokenizer
from thor_spec.nano.recipes import TargetRecipe

# Least log probability in the bigram table: low enough that greedy decoding never picks an unseen pair unprompted.
FLOOR = -9.0


def config(recipe: TargetRecipe) -> dict[str, Any]:
    """Return ``config.json`` as transformers and vLLM read it."""
    common: dict[str, Any] = {
        "vocab_size": tokenizer.VOCABULARY,
        "hidden_size": recipe.hidden,
        "intermediate_size": recipe.intermediate,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": recipe.max_length,
        "initializer_range": 0.02,
        "rms_norm_eps": recipe.epsilon,
        "use_cache": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": recipe.layer_types(),
        "bos_token_id": None,
        "eos_token_id": tokenizer.MARK_IDS[tokenizer.IM_END],
        "pad_token_id": tokenizer.MARK_IDS[tokenizer.END_OF_TEXT],
        "dtype": "bfloat16",
    }
    if not recipe.hybrid:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **common,
            "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
        }
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **common,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta, "partial_rotary_factor": 0.25},
        "linear_conv_kernel_dim": recipe.conv_kernel,
        "linear_key_head_dim": recipe.linear_head_dim,
        "linear_value_head_dim": recipe.linear_head_dim,
        "linear_num_key_heads": recipe.key_heads,
        "linear_num_value_heads": recipe.value_heads,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": recipe.experts,
        "num_experts_per_tok": recipe.experts_per_token,
        "norm_topk_prob": True,
        "moe_intermediate_size": recipe.expert_intermediate,
        "shared_expert_intermediate_size": recipe.expert_intermediate,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def bigram_log_probabilities() -> Any:
    """Return ``log P(next | current)``, [V, V] float64, from the corpus: smoothed by the byte frequencies, floored."""
    import torch

    size = tokenizer.VOCABULARY
    text = torch.tensor(list(corpus.TEXT.encode()))
    pairs = torch.zeros(size, size, dtype=torch.float64)
    pairs.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1, dtype=torch.float64), accumulate=True)
    frequency = torch.bincount(text, minlength=size).double() / len(text)
    # A row never seen (most bytes, and every special token) falls back to the frequencies.
    smoothed = (pairs + 0.5 * frequency) / (pairs.sum(dim=1, keepdim=True) + 0.5)
    return smoothed.clamp_min(math.exp(FLOOR)).log()


def embedding_and_head(hidden: int, generator: Any) -> tuple[Any, Any, Any]:
    """Return embedding and head, [V, H] float64 each, with ``embedding @ head.T`` equal to the bigram table.

    Rows of the embedding have unit RMS: a constant coordinate for the column means, the left singular vectors of what
    remains, and a random code that tells apart the tokens with equal rows. The third value, [H], reads the constant:
    its product with every row of the embedding is 1.
    """
    import torch

    table = bigram_log_probabilities()
    bias = table.mean(dim=0)
    left, singular, right = torch.linalg.svd(table - bias)
    rank = int((singular > 1e-6 * singular[0]).sum())
    code_size = hidden - rank - 1
    if code_size < 16:
        raise ValueError(f"the bigram table has rank {rank}: too little of hidden size {hidden} is left for codes")
    split = singular[:rank].sqrt()
    structure, readout = left[:, :rank] * split, right[:rank].T * split
    constant = torch.ones(len(table), 1, dtype=torch.float64)
    # Balance: the structure may fill 3/4 of a row's squared norm, the constant 1/8, the code the rest.
    gain = math.sqrt(0.75 * hidden) / float(structure.norm(dim=1).max())
    level = math.sqrt(0.125 * hidden)
    structure, constant = structure * gain, constant * level
    code = torch.randn(len(table), code_size, generator=generator, dtype=torch.float64)
    room = hidden - structure.square().sum(dim=1, keepdim=True) - level**2
    code = code / code.norm(dim=1, keepdim=True) * room.sqrt()
    embedding = torch.cat([structure, constant, code], dim=1)
    head = torch.cat([readout / gain, bias[:, None] / level, torch.zeros(len(table), code_size)], dim=1)
    # A rotation spreads every coordinate over the hidden size, so that nothing hangs on single channels.
    rotation, _ = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator, dtype=torch.float64))
    return embedding @ rotation, head @ rotation, rotation[rank] / level


def weights(recipe: TargetRecipe) -> dict[str, Any]:
    """Return the checkpoint: name to bf16 tensor (``A_log`` and ``dt_bias`` too, as published checkpoints do)."""
    import torch

    generator = torch.Generator().manual_seed(recipe.seed)
    embedding, head, constant = embedding_and_head(recipe.hidden, generator)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    norm = torch.zeros if recipe.hybrid else torch.ones  # Qwen3-Next stores the norm's distance from one
    tensors["model.norm.weight"] = norm(recipe.hidden)
    for layer, kind in enumerate(recipe.layer_types()):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = norm(recipe.hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = norm(recipe.hidden)
        mixer = dict(_gdn(recipe, generator) if kind == "linear_attention" else _attention(recipe, generator))
        if layer == 0 and kind == "full_attention":
            mixer.update(_look_back(recipe, mixer, constant))
        mlp = _experts(recipe, generator) if recipe.hybrid else _mlp(recipe, recipe.intermediate, generator)
        mixer_name = "linear_attn." if kind == "linear_attention" else "self_attn."
        tensors.update({prefix + mixer_name + name: tensor for name, tensor in mixer.items()})
        tensors.update({prefix + "mlp." + name: tensor for name, tensor in mlp})
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def _linear(rows: int, columns: int, generator: Any, gain: float = 1.0) -> Any:
    """Return a random [rows, columns] matrix that maps unit-RMS inputs to outputs of RMS ``gain``."""
    import torch

    return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * (gain / math.sqrt(columns))


def _gdn(recipe: TargetRecipe, generator: Any) -> Iterator[tuple[str, Any]]:
    import torch

    key, value = recipe.key_heads * recipe.linear_head_dim, recipe.value_heads * recipe.linear_head_dim
    yield "in_proj_qkvz.weight", _linear(2 * key + 2 * value, recipe.hidden, generator)
    yield "in_proj_ba.weight", _linear(2 * recipe.value_heads, recipe.hidden, generator)
    yield "conv1d.weight", _linear(2 * key + value, recipe.conv_kernel, generator, gain=1.5)[:, None, :]
    # Memories of about 2 to 100 tokens: softplus(dt_bias + a) is near 1, so A is the decay rate per token.
    yield "A_log", torch.linspace(math.log(0.01), math.log(0.5), recipe.value_heads)
    yield "dt_bias", torch.full((recipe.value_heads,), math.log(math.e - 1))
    yield "norm.weight", torch.ones(recipe.linear_head_dim)
    # RMSNorm(o) * SiLU(z) has an RMS of about 0.6 for unit-RMS z.
    yield "out_proj.weight", _linear(recipe.hidden, value, generator, gain=recipe.gdn_strength / 0.6)


def _attention(recipe: TargetRecipe, generator: Any) -> Iterator[tuple[str, Any]]:
    import torch

    query, key = recipe.heads * recipe.head_dim, recipe.kv_heads * recipe.head_dim
    gated = 2 if recipe.hybrid else 1
    yield "q_proj.weight", _linear(gated * query, recipe.hidden, generator)
    yield "k_proj.weight", _linear(key, recipe.hidden, generator)
    yield "v_proj.weight", _linear(key, recipe.hidden, generator)
    yield "o_proj.weight", _linear(recipe.hidden, query, generator, gain=2.0 * recipe.attention_strength * gated)
    # Half as sharp again as unit queries and keys, so that single tokens of the context matter.
    sharpness = torch.full((recipe.head_dim,), 0.5 if recipe.hybrid else 1.5)
    yield "q_norm.weight", sharpness
    yield "k_norm.weight", sharpness


def _look_back(recipe: TargetRecipe, mixer: dict[str, Any], constant: Any) -> Iterator[tuple[str, Any]]:
    """Point head h of the first layer at the token h + 1 places back, whatever the tokens are.

    A GDN layer sees its neighbours through the convolution; a dense model would spend most of its training on finding
    them. Keys are one constant vector, queries the same vector turned back by h + 1 positions, in the coordinates that
    rotate fastest; an admixture of the random projections leaves room to learn.
    """
    import torch

    half, fastest = recipe.head_dim // 2, 4
    angle = recipe.rope_theta ** (-torch.arange(fastest, dtype=torch.float64) / half)
    amplitude = math.sqrt(recipe.head_dim / fastest)

    def turned(back: int) -> Any:
        vector = torch.zeros(recipe.head_dim, dtype=torch.float64)
        vector[:fastest] = amplitude * torch.cos(back * angle)
        vector[half : half + fastest] = -amplitude * torch.sin(back * angle)
        return vector

    queries = torch.cat([turned(head + 1) for head in range(recipe.heads)])
    keys = torch.cat([turned(0)] * recipe.kv_heads)
    yield "q_proj.weight", 0.1 * mixer["q_proj.weight"] + torch.outer(queries, constant)
    yield "k_proj.weight", 0.1 * mixer["k_proj.weight"] + torch.outer(keys, constant)
    yield "q_norm.weight", torch.full((recipe.head_dim,), 2.0)
    yield "k_norm.weight", torch.full((recipe.head_dim,), 2.0)


def _mlp(recipe: TargetRecipe, intermediate: int, generator: Any) -> Iterator[tuple[str, Any]]:
    yield "gate_proj.weight", _linear(intermediate, recipe.hidden, generator)
    yield "up_proj.weight", _linear(intermediate, recipe.hidden, generator)
    # SiLU(gate) * up has an RMS of about 0.6.
    yield "down_proj.weight", _linear(recipe.hidden, intermediate, generator, gain=recipe.mlp_strength / 0.6)


def _experts(recipe: TargetRecipe, generator: Any) -> Iterator[tuple[str, Any]]:
    # Wide router logits: the choice of experts should not hang on rounding.
    yield "gate.weight", _linear(recipe.experts, recipe.hidden, generator, gain=3.0)
    yield "shared_expert_gate.weight", _linear(1, recipe.hidden, generator)
    for expert in range(recipe.experts):
        for name, tensor in _mlp(recipe, recipe.expert_intermediate, generator):
            yield f"experts.{expert}.{name}", tensor
    for name, tensor in _mlp(recipe, recipe.expert_intermediate, generator):
        yield f"shared_expert.{name}", tensor


def save(directory: Path, recipe: TargetRecipe) -> None:
    """Write the untrained checkpoint as stock transformers and vLLM load it."""
    from safetensors.torch import save_file

    save_file(weights(recipe), directory / "model.safetensors", metadata={"format": "pt"})
    save_settings(directory, recipe)


def save_settings(directory: Path, recipe: TargetRecipe) -> None:
    """Write everything but the weights: configuration, generation defaults, tokenizer."""
    generation = {
        "bos_token_id": None,
        "eos_token_id": [tokenizer.MARK_IDS[tokenizer.IM_END], tokenizer.MARK_IDS[tokenizer.END_OF_TEXT]],
        "pad_token_id": tokenizer.MARK_IDS[tokenizer.END_OF_TEXT],
        "do_sample": False,
    }
    for name, content in (("config.json", config(recipe)), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(directory, max_length=recipe.max_length)


def load(directory: Path) -> Any:
    """Return the transformers model in ``directory``, in float32 and in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
