"""How many parameters a model has, and how many bytes they take under its quantization."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thor_spec.capacity.shape import ModelShape
from thor_spec.errors import ConfigError

_PATCH_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Component:
    """Parameters that share a name pattern, and with it a quantization."""

    name: str
    """The module's name in the first layer that has one, as ignore lists of quantizers match it."""
    parameters: int
    quantizable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Bits per quantized parameter, scales included, and which modules are left out."""

    name: str
    bits: float
    ignore: tuple[str, ...] = ()

    def covers(self, component: Component) -> bool:
        """Return whether the component's parameters are quantized."""
        return component.quantizable and not any(_matches(pattern, component.name) for pattern in self.ignore)


def components(shape: ModelShape) -> tuple[Component, ...]:
    """Return every parameter of the model, by component; norms and scalars are too few to count."""
    return tuple(_components(shape))


def _components(shape: ModelShape) -> Iterator[Component]:
    hidden, attention = shape.hidden, shape.attention
    if shape.feature_layers:  # a drafter uses the target's embedding and output head
        yield Component("model.fc", shape.feature_layers * hidden * hidden)
    else:
        yield Component("model.embed_tokens", shape.vocab * hidden, quantizable=False)
        if not shape.tied:
            yield Component("lm_head", shape.vocab * hidden)
    query = attention.heads * attention.head_dim
    key = attention.kv_heads * attention.head_dim
    per_layer = hidden * (query * (2 if attention.gated else 1) + 2 * key) + query * hidden
    yield Component("model.layers.3.self_attn.q_proj", attention.layers * per_layer)
    if delta := shape.delta_net:
        value = delta.value_heads * delta.value_dim
        per_layer = hidden * (delta.channels + value) + value * hidden
        yield Component("model.layers.0.linear_attn.in_proj_qkv", delta.layers * per_layer)
        small = hidden * 2 * delta.value_heads + delta.channels * delta.taps
        yield Component("model.layers.0.linear_attn.in_proj_ba", delta.layers * small, quantizable=False)
    if shape.dense_layers:
        yield Component("model.layers.0.mlp.gate_proj", shape.dense_layers * 3 * hidden * shape.intermediate)
    if experts := shape.experts:
        sparse = shape.layers - shape.dense_layers
        routed = experts.count * 3 * hidden * experts.intermediate
        yield Component("model.layers.0.mlp.experts.0.gate_proj", sparse * routed)
        shared = 3 * hidden * experts.shared_intermediate
        yield Component("model.layers.0.mlp.shared_expert.gate_proj", sparse * shared)
        yield Component("model.layers.0.mlp.gate", sparse * hidden * (experts.count + 1), quantizable=False)
    if shape.vision:
        yield Component("model.visual.blocks.0.attn.qkv", _vision(shape.vision), quantizable=False)


def _vision(config: Mapping[str, Any]) -> int:
    """Return the parameters of a vision tower with the fields of Qwen's; one without them counts nothing."""
    try:
        depth, hidden, inner = (int(config[name]) for name in ("depth", "hidden_size", "intermediate_size"))
        patch = int(config["patch_size"]) ** 2 * int(config["temporal_patch_size"]) * _PATCH_CHANNELS
        merged = hidden * int(config["spatial_merge_size"]) ** 2
        out = int(config["out_hidden_size"])
    except (KeyError, TypeError, ValueError):
        return 0
    return depth * (4 * hidden * hidden + 2 * hidden * inner) + patch * hidden + merged * (merged + out)


def parse_scheme(name: str, config: Mapping[str, Any] | None) -> Scheme | None:
    """Return the scheme of a ``quantization_config``, or None for unquantized weights.

    Raises: ConfigError, for a method whose size is not known here.
    """
    if config is None:
        return None
    method = str(config.get("quant_method", "")).lower()
    ignored = config.get("ignore") or config.get("modules_to_not_convert") or config.get("exclude_modules") or ()
    ignore = tuple(str(entry) for entry in ignored) if isinstance(ignored, Sequence) else ()
    if method == "compressed-tensors":
        groups = config.get("config_groups")
        group: Any = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            return Scheme(name=method, bits=_bits(name, weights), ignore=ignore)
    if method == "modelopt":
        algorithm = str(config.get("quant_algo", "")).upper()
        bits = {"NVFP4": 4.5, "FP8": 8.0, "MXFP8": 8.25}.get(algorithm)
        if bits:
            return Scheme(name=f"modelopt {algorithm}", bits=bits, ignore=ignore)
    if method == "fp8":
        block = config.get("weight_block_size")
        scale = 32 / (int(block[0]) * int(block[1])) if isinstance(block, list) and len(block) == 2 else 0.0
        return Scheme(name=method, bits=8 + scale, ignore=ignore)
    if method in ("awq", "gptq"):
        return Scheme(name=method, bits=_bits(name, {"num_bits": config.get("bits"), **config}), ignore=ignore)
    raise ConfigError(
        f"{name} is quantized with {method or 'an unnamed method'}, whose size thor-spec cannot tell. Known: "
        "compressed-tensors, modelopt, fp8, awq, gptq. State the weights' size with --weights."
    )


def _bits(name: str, weights: Mapping[str, Any]) -> float:
    bits, group = weights.get("num_bits"), weights.get("group_size")
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        raise ConfigError(f"The quantization_config of {name} has num_bits {bits!r}; 1 to 16 are known.")
    if not isinstance(group, int) or group <= 0:
        return float(bits)
    # NVFP4 has an FP8 scale per group; integers have a 16-bit one.
    return bits + (8 if weights.get("type") == "float" and bits == 4 else 16) / group


def _matches(pattern: str, module: str) -> bool:
    """Return whether an ignore entry names a module: a regular expression, a wildcard, a layer's part, or a prefix."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), module) is not None
        except re.error:
            return False
    if "*" in pattern:
        return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), module) is not None
    plain, named = (re.sub(r"\.\d+(?=\.|$)", "", text) for text in (module, pattern))
    return plain == named or plain.startswith(f"{named}.") or named.startswith(f"{plain.rpartition('.')[0]}.")


def weight_bytes(shape: ModelShape) -> int:
    """Return the bytes of all parameters. Raises: ConfigError."""
    scheme = parse_scheme(shape.name, shape.quantization)
    total = 0.0
    for component in components(shape):
        bits = scheme.bits if scheme and scheme.covers(component) else 8 * shape.element_bytes
        total += component.parameters * bits / 8
    return int(total)
