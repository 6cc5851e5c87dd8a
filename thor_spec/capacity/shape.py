"""What a model's ``config.json`` says about its size: layers, heads, experts, quantization."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thor_spec.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The layers that keep a key and a value per token."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    """The query projection also makes the output's gate, and is twice as wide."""

    def bytes_per_token(self, element_bytes: int) -> int:
        """Return what one token takes in one layer."""
        return 2 * self.kv_heads * self.head_dim * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """The Gated-DeltaNet layers: a matrix per value head, and the last inputs of a short convolution."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: query, key and value."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self, element_bytes: int) -> int:
        """Return the recurrent state of one sequence in one layer."""
        return self.value_heads * self.value_dim * self.key_dim * element_bytes

    def conv_bytes(self, element_bytes: int, drafts: int = 0) -> int:
        """Return the convolution's window of one sequence in one layer; ``drafts`` more columns are kept to verify."""
        return self.channels * (self.taps - 1 + drafts) * element_bytes

    def record_bytes(self, element_bytes: int) -> int:
        """Return what verifying keeps of one node in one layer.

        That is its key, its pseudo-value in fp32, two scalars per head, and the convolution's input.
        """
        record = self.value_heads * (self.value_dim + 1) * 4 + self.key_heads * (self.key_dim * element_bytes + 4)
        return record + self.channels * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture-of-experts MLP; the dense models have none."""

    count: int
    active: int
    intermediate: int
    shared_intermediate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model, target or drafter, as far as memory is concerned."""

    name: str
    architecture: str
    hidden: int
    vocab: int
    intermediate: int
    layers: int
    dense_layers: int
    """Leading layers with a dense MLP; all of them without experts."""
    linear_layers: tuple[int, ...]
    """Which layers are Gated-DeltaNet; the others are attention."""
    attention: Attention
    delta_net: DeltaNet | None
    experts: Experts | None
    tied: bool
    context: int
    element_bytes: int
    state_dtype: str
    """The dtype that the publisher names for recurrent state; vLLM follows it."""
    vision: Mapping[str, Any] | None
    quantization: Mapping[str, Any] | None
    feature_layers: int
    """Target layers whose outputs a DFlash drafter reads; 0 for a target."""
    sliding_layers: int
    """Of a DFlash drafter's attention layers, those that see no more than the last ``window`` tokens."""
    window: int | None

    @classmethod
    def parse(cls, name: str, config: Mapping[str, Any]) -> "ModelShape":
        """Read the content of a ``config.json``. Raises: ConfigError, naming the field."""
        nested = config.get("text_config")
        text = nested if isinstance(nested, Mapping) else config
        reader = _Fields(name, text)
        layers = reader.number("num_hidden_layers")
        kinds = _layer_kinds(text, layers)
        linear = tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
        heads, hidden = reader.number("num_attention_heads"), reader.number("hidden_size")
        experts = _experts(reader)
        architectures = config.get("architectures") or ["?"]
        dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"The config.json of {name} has dtype {dtype!r}. Known: {', '.join(DTYPE_BYTES)}.")
        dflash = _mapping(config.get("dflash_config"))
        targets = dflash.get("target_layer_ids") if dflash else None
        sliding = _sliding(dflash, kinds) if dflash else 0
        return cls(
            name=name,
            architecture=str(architectures[0]),
            hidden=hidden,
            vocab=reader.number("vocab_size"),
            intermediate=reader.number("intermediate_size", 0 if experts else None),
            layers=layers,
            dense_layers=reader.number("first_k_dense_replace", 0) if experts else layers,
            linear_layers=linear,
            attention=Attention(
                layers=layers - len(linear),
                heads=heads,
                kv_heads=reader.number("num_key_value_heads", heads),
                head_dim=reader.number("head_dim", hidden // heads),
                gated=bool(text.get("attn_output_gate", bool(linear))),
            ),
            delta_net=_delta_net(reader, len(linear)) if linear else None,
            experts=experts,
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            context=reader.number("max_position_embeddings"),
            element_bytes=DTYPE_BYTES[dtype],
            state_dtype=str(text.get("mamba_ssm_dtype") or dtype),
            vision=_mapping(config.get("vision_config")),
            quantization=_mapping(config.get("quantization_config") or text.get("quantization_config")),
            feature_layers=len(targets) if isinstance(targets, list) else 0,
            sliding_layers=sliding,
            window=_window(name, dflash or {}, text) if sliding else None,
        )


class _Fields:
    def __init__(self, name: str, text: Mapping[str, Any]) -> None:
        self.name = name
        self.text = text

    def number(self, field: str, default: int | None = None) -> int:
        value = self.text.get(field)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"The config.json of {self.name} has {field} = {value!r}, where a number is needed. "
                "Take the config.json of the published checkpoint."
            )
        return value


def _mapping(value: object) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None


def _layer_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return [str(kind) for kind in kinds]
    interval = text.get("full_attention_interval")
    if isinstance(interval, int) and interval > 0 and text.get("linear_num_value_heads"):
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    return ["full_attention"] * layers


def _sliding(dflash: Mapping[str, Any], kinds: list[str]) -> int:
    """Return how many of a drafter's layers slide: those that say so, or all by ``use_swa``, as vLLM reads them."""
    return kinds.count("sliding_attention") or (len(kinds) if dflash.get("use_swa") else 0)


def _window(name: str, dflash: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    window = dflash.get("swa_window_size", text.get("sliding_window"))
    if not isinstance(window, int) or window < 1:
        raise ConfigError(
            f"The config.json of {name} has sliding layers, and neither swa_window_size nor sliding_window says how "
            "far they see."
        )
    return window


def _delta_net(reader: _Fields, layers: int) -> DeltaNet:
    return DeltaNet(
        layers=layers,
        key_heads=reader.number("linear_num_key_heads"),
        value_heads=reader.number("linear_num_value_heads"),
        key_dim=reader.number("linear_key_head_dim"),
        value_dim=reader.number("linear_value_head_dim"),
        taps=reader.number("linear_conv_kernel_dim", 4),
    )


def count_experts(text: Mapping[str, Any]) -> int:
    """Return the experts of a layer, under the names that published configurations have for them; 0: it is dense."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return next((int(text[name]) for name in names if text.get(name)), 0)


def _experts(reader: _Fields) -> Experts | None:
    count = count_experts(reader.text)
    if not count:
        return None
    if "moe_intermediate_size" not in reader.text:
        raise ConfigError(
            f"The model has {count} experts, and its config.json does not say how large they are "
            "(moe_intermediate_size): what fits cannot be computed."
        )
    intermediate = reader.number("moe_intermediate_size")
    shared = reader.text.get("shared_expert_intermediate_size")
    if shared is None:
        shared = intermediate * reader.number("num_shared_experts", 0)
    return Experts(
        count=count,
        active=reader.number("num_experts_per_tok"),
        intermediate=intermediate,
        shared_intermediate=int(shared),
    )
