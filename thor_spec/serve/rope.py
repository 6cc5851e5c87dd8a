"""What ``--rope`` means for a target and its drafter, and what of it cannot work, before anything starts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thor_spec import json_text
from thor_spec.config import ServeConfig
from thor_spec.errors import ConfigError
from thor_spec.rope.scheme import Scheme
from thor_spec.serve import passthrough
from thor_spec.serve.checkpoint import Checkpoint

FLAG = "--hf-overrides"
_POSITIONAL = frozenset(
    {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings"}
)
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def scheme_of(config: ServeConfig, target: Checkpoint) -> Scheme | None:
    """Return the scheme that was asked for, or None. Raises: ConfigError, naming the option."""
    if config.rope is None:
        for name in ("rope_native", "rope_factor", "rope_factors", "rope_drafter"):
            if getattr(config, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs a type. Name it: --rope.")
        return None
    native = config.rope_native or _native(target)
    made_for = target.context
    if native > made_for:
        raise ConfigError(f"--rope-native {native} is more than the {made_for} tokens that {target.name} was made for.")
    values: dict[str, Any] = {"type": config.rope, "native": native, "factor": config.rope_factor or 1.0}
    scheme = Scheme.parse(
        values | (_factors(config.rope_factors) if config.rope_factors else _own_factors(config, target))
    )
    scheme.frequencies(_rotary_dim(target), _theta(target), scheme.rows)  # checks the lists' lengths
    return scheme


def require_reach(scheme: Scheme | None, context: int, target: Checkpoint, drafter: Checkpoint | None) -> None:
    """Check that every position that may be used lies in a table. Raises: ConfigError, with both numbers."""
    most = scheme.rows if scheme else target.context
    if context > most:
        if scheme:
            raise ConfigError(
                f"--context {context} is beyond the table of --rope {scheme.type}: {scheme.native} x {scheme.factor:g} "
                f"= {most} positions. Raise --rope-factor, or take at most {most}."
            )
        raise ConfigError(
            f"--context {context} is more than the {most} tokens that {target.name} was made for. "
            f"Take at most {most}, or stretch it: --rope."
        )
    if drafter is None:
        return
    short = "The engine would read past its end, and speak nonsense or die. "
    if scheme is None and drafter.context < context:
        raise ConfigError(
            f"The drafter {drafter.name} has rope tables for {drafter.context} positions, and --context is {context}. "
            f"{short}Lower --context, stretch both (--rope), or take --draft none."
        )
    if scheme is not None and drafter.context < scheme.native:
        raise ConfigError(
            f"The drafter {drafter.name} was made for {drafter.context} positions, fewer than the native "
            f"{scheme.native} of its target, so one --rope cannot stretch both. Take --draft none."
        )
    if scheme is not None and drafter.text_config.get("head_dim") is not None:
        scheme.frequencies(_rotary_dim(drafter), _theta(drafter), scheme.rows)


def options(config: ServeConfig, scheme: Scheme | None) -> dict[str, Any]:
    """Return what the plugin is told."""
    if scheme is None:
        return {}
    return {"rope": scheme.as_dict(), **({"rope_drafter": config.rope_drafter} if config.rope_drafter else {})}


def overrides(scheme: Scheme | None, target: Checkpoint, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return vLLM's ``--hf-overrides`` with its value, if it is needed, and ``args`` without the flag.

    The configuration must say the length of the table, and plain frequencies, for the plugin to put its own in place.

    Raises: ConfigError, on overrides that contradict ``--rope``, and on those that vLLM would take and never read.
    """
    passed, rest = passthrough.take_json(FLAG, args)
    nested = isinstance(target.config.get("text_config"), Mapping)
    single = [
        flag.removeprefix(f"{FLAG}.").split(".")[0]
        for flag, _ in passthrough.flags(rest)
        if flag.startswith(f"{FLAG}.")
    ]
    if single and (scheme or (nested and _POSITIONAL & {name.replace("-", "_") for name in single})):
        raise ConfigError(f"{FLAG}.{single[0]} cannot be checked here. Write {FLAG} as one JSON object.")
    if nested and (lost := sorted(_POSITIONAL & set(passed))):
        raise ConfigError(
            f"{FLAG} sets {', '.join(lost)} beside the text_config of {target.name}, where vLLM does not look for it: "
            f"it would be ignored. Write {FLAG} '{json.dumps({'text_config': {lost[0]: passed[lost[0]]}})}'."
        )
    if scheme is None:
        return ([FLAG, json.dumps(passed)] if passed else []), rest
    inner = passed.get("text_config", {}) if nested else passed
    if clash := sorted(_POSITIONAL & set(inner if isinstance(inner, Mapping) else ())):
        raise ConfigError(
            f"{FLAG} sets {', '.join(clash)}, and --rope {scheme.type} sets it, too. Leave one of them out."
        )
    ours = {"max_position_embeddings": scheme.rows, "rope_parameters": _plain_parameters(target)}
    merged = {**passed, "text_config": {**inner, **ours}} if nested else {**passed, **ours}
    return [FLAG, json.dumps(merged)], rest


def _native(target: Checkpoint) -> int:
    parameters = _parameters(target)
    if original := parameters.get("original_max_position_embeddings"):
        return int(original)
    if parameters.get("rope_type", "default") != "default":
        raise ConfigError(
            f"{target.name} is stretched by {parameters['rope_type']} already and does not say from what: its native "
            "window is unknown. Name it: --rope-native."
        )
    return target.context


def _parameters(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the rope parameters, of the old and the new form."""
    text = checkpoint.text_config
    found = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in found.values()):
        raise ConfigError(f"{checkpoint.name} has rope parameters by kind of layer, which --rope does not know.")
    found.setdefault("rope_type", found.pop("type", "default"))
    if found["rope_type"] == "mrope":
        found["rope_type"] = "default"
    for name in ("rope_theta", "partial_rotary_factor"):
        if name not in found and text.get(name) is not None:
            found[name] = text[name]
    return found


def _plain_parameters(target: Checkpoint) -> dict[str, Any]:
    found = _parameters(target)
    return {"rope_type": "default", **{name: found[name] for name in _KEPT if name in found}}


def _rotary_dim(checkpoint: Checkpoint) -> int:
    text = checkpoint.text_config
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return int(head * _parameters(checkpoint).get("partial_rotary_factor", 1.0))


def _theta(checkpoint: Checkpoint) -> float:
    return float(_parameters(checkpoint).get("rope_theta", 1_000_000.0))  # vLLM's own default for these models


def _own_factors(config: ServeConfig, target: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's own LongRoPE lists, if it has them and they are asked for."""
    found = _parameters(target) if config.rope == "longrope" else {}
    return {name: found[name] for name in ("short_factor", "long_factor") if name in found}


def _factors(path: Path) -> dict[str, Any]:
    try:
        content = json_text.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--rope-factors {path} cannot be read as JSON: {error}.") from error
    if isinstance(content, list):
        return {"long_factor": content}
    if not isinstance(content, dict) or not {"short_factor", "long_factor"} & set(content):
        raise ConfigError(
            f"--rope-factors {path} must hold a list, or an object with short_factor, long_factor or both."
        )
    return {name: content[name] for name in ("short_factor", "long_factor") if name in content}
