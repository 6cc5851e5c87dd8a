"""What a LLaDA2.x checkpoint holds, and what it leaves unsaid."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from thor_spec.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

BLOCK, MASK = 32, 156895
"""What LLaDA2.x means where its configuration does not say it."""


def block_of(config: Mapping[str, Any]) -> int:
    """Return the length of a block."""
    return int(config.get("block_length") or BLOCK)


def mask_of(config: Mapping[str, Any]) -> int:
    """Return the mask's id."""
    found = config.get("mask_token_id")
    return MASK if found is None else int(found)


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor that a checkpoint of this configuration holds."""
    hidden, heads, groups = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // heads

    def swiglu(name: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}gate_proj.weight", (inner, hidden)
        yield f"{name}up_proj.weight", (inner, hidden)
        yield f"{name}down_proj.weight", (hidden, inner)

    yield "model.word_embeddings.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        yield f"{name}input_layernorm.weight", (hidden,)
        yield f"{name}post_attention_layernorm.weight", (hidden,)
        yield f"{name}attention.query_key_value.weight", ((heads + 2 * groups) * size, hidden)
        yield f"{name}attention.query_layernorm.weight", (size,)
        yield f"{name}attention.key_layernorm.weight", (size,)
        yield f"{name}attention.dense.weight", (hidden, heads * size)
        if layer < config["first_k_dense_replace"]:
            yield from swiglu(f"{name}mlp.", config["intermediate_size"])
            continue
        yield f"{name}mlp.gate.weight", (config["num_experts"], hidden)
        if config.get("moe_router_enable_expert_bias", True):
            yield f"{name}mlp.gate.expert_bias", (config["num_experts"],)
        for expert in range(config["num_experts"]):
            yield from swiglu(f"{name}mlp.experts.{expert}.", config["moe_intermediate_size"])
        if shared := config["num_shared_experts"]:
            one = config.get("moe_shared_expert_intermediate_size") or config["moe_intermediate_size"]
            yield from swiglu(f"{name}mlp.shared_experts.", shared * one)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def checked(weights: Iterable[tuple[str, "Tensor"]], config: dict[str, Any]) -> Iterator[tuple[str, "Tensor"]]:
    """Yield ``weights``, each once, of the shapes that ``config`` means; complain at the end if any is missing.

    Raises: ConfigError, naming tensors that are missing, unknown, doubled or misshapen.
    """
    expected = dict(tensor_shapes(config))
    wanted = dict(expected)
    for name, tensor in weights:
        if name not in expected:
            raise ConfigError(f"The checkpoint holds {name}, which LLaDA2 does not have. Check its config.json.")
        if name not in wanted:
            raise ConfigError(f"The checkpoint holds {name} twice. Download it again.")
        if tuple(tensor.shape) != wanted.pop(name):
            raise ConfigError(
                f"{name} has the shape {tuple(tensor.shape)}, and config.json means {expected[name]}. "
                "Weights and config.json are of different models."
            )
        yield name, tensor
    if wanted:
        some = ", ".join(sorted(wanted)[:3])
        more = f" and {len(wanted) - 3} more" if len(wanted) > 3 else ""
        raise ConfigError(f"The checkpoint lacks {some}{more}. Download it again.")
