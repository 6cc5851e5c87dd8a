"""How positions are told apart, and beyond which of them a model is on ground that it was not trained for."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from thor_spec.errors import ConfigError
from thor_spec.rope import tables
from thor_spec.rope.tables import Frequencies

Type = Literal["default", "yarn", "longrope", "linear", "identity_beyond_native", "nope"]
ALIASES = {"drope": "identity_beyond_native"}
"""``drope`` is what an earlier study called it; the published DroPE (arXiv:2512.12167) is ``nope``, and retrains."""
NAMES = (*get_args(Type), *ALIASES)
_FACTOR_LISTS = ("short_factor", "long_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One rope type with its numbers. The table that it describes has ``rows`` = ``native * factor`` positions."""

    type: Type = "default"
    native: int
    """The context that the model was trained with, in tokens."""
    factor: float = 1.0
    """How many times the native context is to be usable; scaled types stretch by it."""
    short_factor: tuple[float, ...] = ()
    """With ``longrope``: factors, one per rotated pair, of engines whose context is within the native one."""
    long_factor: tuple[float, ...] = ()
    """The same of engines with a longer context; empty takes ``tables.stepped``."""

    def __post_init__(self) -> None:
        if self.type not in get_args(Type):
            raise ConfigError(f"--rope {self.type} is not one of {', '.join(NAMES)}.")
        if self.native <= 1:
            raise ConfigError(f"--rope-native {self.native} must be the model's own context in tokens.")
        if not 1 <= self.factor <= 1024:
            raise ConfigError(f"--rope-factor {self.factor:g} must be at least 1, and at most 1024.")
        if (self.short_factor or self.long_factor) and self.type != "longrope":
            raise ConfigError(f"Lists of factors belong to --rope longrope, not {self.type}. Leave --rope-factors out.")

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Scheme":
        """Read what ``as_dict`` gave, or a user wrote. Raises: ConfigError, naming the field."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"rope has unknown fields {', '.join(unknown)}. Known: {', '.join(sorted(known))}.")
        given = dict(values)
        given["type"] = ALIASES.get(given.get("type", "default"), given.get("type", "default"))
        try:
            for name in _FACTOR_LISTS:
                given[name] = tuple(float(factor) for factor in given.get(name) or ())
            given["factor"] = float(given.get("factor", 1.0))
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rope is malformed: {error}.") from error

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that say something, JSON-ready."""
        found: dict[str, Any] = {"type": self.type, "native": self.native, "factor": self.factor}
        return found | {name: list(value) for name in _FACTOR_LISTS if (value := getattr(self, name))}

    @property
    def rows(self) -> int:
        """Return how many positions the table has."""
        return round(self.native * self.factor)

    @property
    def keeps_native(self) -> bool:
        """Return whether positions within the native context are told apart exactly as by ``default``."""
        return self.type in ("default", "identity_beyond_native")

    @property
    def described(self) -> str:
        """Return it in a few words."""
        return f"{self.type}, {self.native:,} x {self.factor:g}"

    def frequencies(self, rotary_dim: int, theta: float, context: int) -> Frequencies:
        """Return the frequencies of an engine whose longest sequence is ``context`` tokens.

        Those of ``nope`` are 0; those of ``identity_beyond_native`` hold within the native context only.

        Raises: ConfigError, if a list of factors does not fit.
        """
        if self.type == "yarn":
            return tables.yarn(rotary_dim, theta, self.factor, self.native)
        if self.type == "linear":
            return tables.linear(rotary_dim, theta, self.factor)
        if self.type == "longrope":
            stretched = self.long_factor or tables.stepped(rotary_dim, theta, self.factor, self.native)
            rescale = stretched if context > self.native else self.short_factor or (1.0,) * (rotary_dim // 2)
            return tables.longrope(rotary_dim, theta, self.factor, self.native, rescale)
        plain = tables.default(rotary_dim, theta)
        return Frequencies(inverse=(0.0,) * len(plain.inverse)) if self.type == "nope" else plain
