"""Arms of a comparison: what each one changes, and whether it changes anything else."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from thor_spec.config import ServeConfig, typed
from thor_spec.dflash.acceptance import Acceptance
from thor_spec.errors import ConfigError

RULE_KEYS = ("accept", "accept_eps", "accept_delta")
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p")
REQUEST_KEYS = (*RULE_KEYS, *SAMPLING_KEYS, "batch", "tokens")
RANDOM_KEYS = ("dummy_weights", "synthetic_acceptance")
_COMMON = {
    "host",
    "port",
    "api_key",
    "log_file",
    "wait",
    "golden",
    "canary",
    "allow_controls",
    "record",
    "record_contents",
    *RANDOM_KEYS,
}
SERVER_KEYS = tuple(field.name for field in fields(ServeConfig) if field.name not in {*_COMMON, *RULE_KEYS})
KEYS = (*REQUEST_KEYS, *SERVER_KEYS, "url")
FLAG, VARIABLE = "flag ", "environment "
"""How facts about the engine's command line and environment begin: made of the server's options, which explain them."""
FOLLOWS = {
    "draft": ("draft_tokens", "drafter"),
    "tree": ("draft_tokens",),
    "model": ("target", "drafter", "draft_tokens", "served_model", "context"),
    **dict.fromkeys(("rope", "rope_native", "rope_factor", "rope_factors"), ("context",)),
}
"""What may change besides because something else was declared to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One configuration: ``declared`` over what all arms share."""

    name: str
    declared: Mapping[str, Any]
    shared: Mapping[str, Any]

    def __post_init__(self) -> None:
        for key in {**self.shared, **self.declared}:
            if key not in KEYS:
                raise ConfigError(f"Arm {self.name}: there is no option {key}. Known: {', '.join(KEYS)}.")
        if not isinstance(self.batch, int) or self.batch < 1:
            raise ConfigError(f"Arm {self.name}: batch={self.batch!r} must be a whole number of at least 1.")
        self.rule  # noqa: B018  # checks it

    @property
    def options(self) -> dict[str, Any]:
        """Everything that is set, for this arm or for all."""
        return {**self.shared, **self.declared}

    @property
    def server(self) -> str:
        """What tells servers apart: arms with the same may share one."""
        theirs = {k: v for k, v in self.options.items() if k in SERVER_KEYS or k == "url"}
        return json.dumps(theirs, sort_keys=True, default=str)

    @property
    def batch(self) -> int:
        """Requests at once."""
        return self.options.get("batch", 1)  # type: ignore[no-any-return]

    @property
    def drafts(self) -> bool:
        """Whether it may speculate."""
        return self.options.get("draft") != "none"

    @property
    def rule(self) -> Acceptance:
        """How drafts are taken. Raises: ConfigError."""
        return Acceptance().of_request({k: v for k, v in self.options.items() if k in RULE_KEYS})

    @property
    def request(self) -> dict[str, Any]:
        """What each request of this arm says."""
        said: dict[str, Any] = {k: v for k, v in self.options.items() if k in SAMPLING_KEYS}
        rule = {k: v for k, v in self.options.items() if k in RULE_KEYS}
        return {**said, "thor_spec": rule} if rule and self.drafts else said


def parse(described: Sequence[str], shared: Mapping[str, Any]) -> list[Arm]:
    """Return the arms that ``--arms`` describes: YAML files, or ``NAME`` and ``NAME:KEY=VALUE,…``.

    A file maps names to options; its entry ``shared`` holds for all of them. Raises: ConfigError.
    """
    import yaml

    named: dict[str, Mapping[str, Any]] = {}
    common = dict(shared)
    for text in described:
        if text.endswith((".yaml", ".yml")):
            found = _read(Path(text))
            common |= found.pop("shared", None) or {}
        else:
            name, _, rest = text.partition(":")
            pairs = [part.partition("=") for part in rest.split(",") if part]
            if malformed := [key for key, equals, _ in pairs if not equals]:
                raise ConfigError(f"--arms {text}: {malformed[0]!r} is not KEY=VALUE.")
            texts = {key.strip().replace("-", "_"): value for key, _, value in pairs}
            found = {name: _typed(name, {key: yaml.safe_load(value) for key, value in texts.items()}, texts)}
        if twice := set(found) & set(named):
            raise ConfigError(f"There are two arms {', '.join(sorted(twice))}. Give each a name of its own.")
        named |= {name: options or {} for name, options in found.items()}
    arms = [Arm(name=name, declared=dict(options), shared=common) for name, options in named.items()]
    return arms or [Arm(name="default", declared={}, shared=common)]


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content, written = yaml.safe_load(text), yaml.load(text, Loader=yaml.BaseLoader)  # strings only
    except OSError as error:
        raise ConfigError(f"The arms {path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"The arms {path} are not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict) or not all(isinstance(v, dict | None) for v in content.values()):
        raise ConfigError(f"{path} must map names of arms to options.")
    named = zip(written.items(), content.values(), strict=True)  # `off` is a name, too
    return {name: _typed(name, options or {}, texts or {}) for (name, texts), options in named}


def _typed(name: str, values: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return an arm's options with those of the server as a profile has them; null takes one back that is shared."""
    ours = {key: value for key, value in values.items() if key in SERVER_KEYS and value is not None}
    return {**values, **typed(ours, texts, where=f"Arm {name}")}


def undeclared(arms: Sequence[Arm], facts: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return what differs and was not declared: between starts of an arm, and between arms.

    Args:
        facts: by the arm's name, what was observed at each of its starts.
    """
    found = []
    for arm in arms:
        first, *later = facts[arm.name]
        for again in later:
            found += [
                f"{arm.name} changed {key} between its starts: {first.get(key)!r}, then {again.get(key)!r}"
                for key in sorted({*first, *again})
                if first.get(key) != again.get(key)
            ]
    base = arms[0]
    for arm in arms[1:]:
        declared = {*arm.declared, *base.declared}
        allowed = declared | {follower for key in declared for follower in FOLLOWS.get(key, ())}
        starts_otherwise = not declared.isdisjoint(SERVER_KEYS)
        mine, theirs = facts[arm.name][0], facts[base.name][0]
        found += [
            f"{arm.name} and {base.name} differ in {key}, which neither declares: {mine.get(key)!r} and "
            f"{theirs.get(key)!r}"
            for key in sorted({*mine, *theirs})
            if mine.get(key) != theirs.get(key)
            and key not in allowed
            and not (starts_otherwise and key.startswith((FLAG, VARIABLE)))
        ]
    return found
