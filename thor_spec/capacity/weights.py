"""How many parameters a model has, and how many bytes they take under its quantization."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thor_spec.capacity.shape import ModelShape
from thor_spec.errors import ConfigError

_PATCH_CHANNELS = 3
_MODELOPT_BITS = {"NVFP4": 4.5, "FP8": 8.0, "MXFP8": 8.25}
_ANY = ("Linear",)  # a class, not a name: every matrix


@dataclass(frozen=True, slots=True)
class Component:
    """One matrix, in each layer that has it."""

    name: str
    """As checkpoints call it; ``{}`` stands for the layer."""
    parameters: int
    """Of one layer."""
    layers: Sequence[int] = (-1,)
    """Which layers; one that does not count where the name has no layer in it."""
    quantizable: bool = True

    @property
    def names(self) -> list[str]:
        """Return its name in each layer."""
        return [self.name.format(layer) for layer in self.layers]

    @property
    def total(self) -> int:
        """Return the parameters of all layers."""
        return self.parameters * len(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Bits per quantized parameter, scales included, by the names that they are for, and which names are left out."""

    name: str
    groups: tuple[tuple[tuple[str, ...], float], ...]
    ignore: tuple[str, ...] = ()

    def bits(self, component: Component, plain: float) -> float:
        """Return the bits of a parameter, averaged over the component's layers; ``plain`` where not quantized."""
        if not component.quantizable:
            return plain
        each = [plain if _any_matches(self.ignore, name) else self._of(name, plain) for name in component.names]
        return sum(each) / len(each)

    def _of(self, name: str, plain: float) -> float:
        return next((bits for names, bits in self.groups if names == _ANY or _any_matches(names, name)), plain)


def components(shape: ModelShape) -> tuple[Component, ...]:
    """Return every matrix of the model; norms and scalars are too few to count."""
    return tuple(_components(shape))


def _components(shape: ModelShape) -> Iterator[Component]:
    hidden = shape.hidden
    if shape.feature_layers:  # a drafter uses the target's embedding and output head
        yield Component("model.fc", shape.feature_layers * hidden * hidden)
    else:
        yield Component("model.embed_tokens", shape.vocab * hidden, quantizable=False)
        if not shape.tied:
            yield Component("lm_head", shape.vocab * hidden)
    yield from _mixers(shape)
    yield from _mlps(shape)
    if shape.vision:
        yield Component("model.visual", _vision(shape.vision), quantizable=False)


def _mixers(shape: ModelShape) -> Iterator[Component]:
    hidden, attention = shape.hidden, shape.attention
    query, key = (heads * attention.head_dim for heads in (attention.heads, attention.kv_heads))
    full = [layer for layer in range(shape.layers) if layer not in shape.linear_layers]
    for name, parameters in {
        "q_proj": hidden * query * (2 if attention.gated else 1),
        "k_proj": hidden * key,
        "v_proj": hidden * key,
        "o_proj": query * hidden,
    }.items():
        yield Component(f"model.layers.{{}}.self_attn.{name}", parameters, full)
    if delta := shape.delta_net:
        value = delta.value_heads * delta.value_dim
        for name, parameters in {
            "in_proj_qkv": hidden * delta.channels,
            "in_proj_z": hidden * value,
            "out_proj": value * hidden,
        }.items():
            yield Component(f"model.layers.{{}}.linear_attn.{name}", parameters, shape.linear_layers)
        small = hidden * 2 * delta.value_heads + delta.channels * delta.taps
        yield Component("model.layers.{}.linear_attn.in_proj_ba", small, shape.linear_layers, quantizable=False)


def _mlps(shape: ModelShape) -> Iterator[Component]:
    hidden, dense = shape.hidden, range(shape.dense_layers)
    if dense:
        yield Component("model.layers.{}.mlp.gate_proj", 3 * hidden * shape.intermediate, dense)
    if experts := shape.experts:
        sparse = range(shape.dense_layers, shape.layers)
        routed = experts.count * 3 * hidden * experts.intermediate
        yield Component("model.layers.{}.mlp.experts.0.gate_proj", routed, sparse)
        shared = 3 * hidden * experts.shared_intermediate
        yield Component("model.layers.{}.mlp.shared_expert.gate_proj", shared, sparse)
        yield Component("model.layers.{}.mlp.gate", hidden * (experts.count + 1), sparse, quantizable=False)


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
    groups: tuple[tuple[tuple[str, ...], float], ...] = ()
    if method == "compressed-tensors":
        groups = _groups(name, config.get("config_groups"))
    elif method == "modelopt":
        bits = _MODELOPT_BITS.get(str(config.get("quant_algo", "")).upper())
        groups = ((_ANY, bits),) if bits else ()
    elif method == "fp8":
        block = config.get("weight_block_size")
        scale = 32 / (int(block[0]) * int(block[1])) if isinstance(block, list) and len(block) == 2 else 0.0
        groups = ((_ANY, 8 + scale),)
    elif method in ("awq", "gptq"):
        groups = ((_ANY, _bits(name, {"num_bits": config.get("bits"), **config})),)
    if not groups:
        raise ConfigError(
            f"{name} is quantized with {method or 'an unnamed method'}, whose size thor-spec cannot tell. Known: "
            "compressed-tensors, modelopt with one algorithm, fp8, awq, gptq. State the weights' size with --weights."
        )
    return Scheme(name=method, groups=groups, ignore=ignore)


def _groups(name: str, config: object) -> tuple[tuple[tuple[str, ...], float], ...]:
    found = []
    for group in config.values() if isinstance(config, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            targets = tuple(str(target) for target in group.get("targets") or _ANY)
            found.append((_ANY if set(_ANY) & set(targets) else targets, _bits(name, weights)))
    return tuple(found)


def _bits(name: str, weights: Mapping[str, Any]) -> float:
    bits, group = weights.get("num_bits"), weights.get("group_size")
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        raise ConfigError(f"The quantization_config of {name} has num_bits {bits!r}; 1 to 16 are known.")
    if not isinstance(group, int) or group <= 0:
        return float(bits)
    # NVFP4 has an FP8 scale per group; integers have a 16-bit one.
    return bits + (8 if weights.get("type") == "float" and bits == 4 else 16) / group


def _any_matches(patterns: Sequence[str], module: str) -> bool:
    return any(_matches(pattern, module) for pattern in patterns)


def _matches(pattern: str, module: str) -> bool:
    """Return whether an entry names a module: a regular expression, a wildcard, the name, or the start of it."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), module) is not None
        except re.error:
            return False
    plain = pattern.replace("language_model.", "")  # as multimodal checkpoints have it
    if "*" in plain:
        return re.fullmatch(re.escape(plain).replace(r"\*", ".*"), module) is not None
    return module == plain or module.startswith(f"{plain}.")


def weight_bytes(shape: ModelShape) -> int:
    """Return the bytes of all parameters. Raises: ConfigError."""
    scheme, plain = parse_scheme(shape.name, shape.quantization), 8.0 * shape.element_bytes
    bits = (component.total * (scheme.bits(component, plain) if scheme else plain) for component in components(shape))
    return int(sum(bits) / 8)
