"""What the launcher asks of the plugin, carried in vLLM's ``additional_config["thor_spec"]``."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from thor_spec.config import RopeDrafter
from thor_spec.dflash.acceptance import DELTA, EPS, Acceptance, Rule
from thor_spec.errors import ConfigError
from thor_spec.rope.scheme import Scheme

NAME = "thor_spec"  # the plugin's name in VLLM_PLUGINS and its key in additional_config
REQUEST_KEYS = {"thor_spec_accept": "accept", "thor_spec_eps": "accept_eps", "thor_spec_delta": "accept_delta"}
"""How a request's own rule travels in ``vllm_xargs``, which take flat values only."""
RunnerKernels = Literal["triton", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOptions:
    """vLLM hashes these into its compile-cache key, so they must be JSON and the same for the same run."""

    runner_kernels: RunnerKernels = "triton"
    """``torch`` replaces the V2 runner's Triton kernels where they would be interpreted, which is slow."""
    accept: Rule = "exact"
    """How drafts are taken, unless a request says otherwise; see ``dflash.acceptance``."""
    accept_eps: float = EPS
    accept_delta: float = DELTA
    max_request_bytes: int = 8 << 20
    """Longest body that the API server reads."""
    rope: Mapping[str, Any] | None = None
    """A ``rope.scheme.Scheme``; None leaves vLLM's own tables."""
    rope_drafter: RopeDrafter = "same"
    """``default`` keeps the drafter's frequencies, in a table that is as long as the target's."""

    def __post_init__(self) -> None:
        if self.runner_kernels not in get_args(RunnerKernels):
            raise ConfigError(
                f"thor_spec.runner_kernels={self.runner_kernels!r} is not one of {', '.join(get_args(RunnerKernels))}."
            )

        if self.rope_drafter not in get_args(RopeDrafter):
            raise ConfigError(
                f"thor_spec.rope_drafter={self.rope_drafter!r} is not one of {', '.join(get_args(RopeDrafter))}."
            )
        self.acceptance  # noqa: B018  # checks the three
        self.scheme("target")

    @property
    def acceptance(self) -> Acceptance:
        """The rule of requests that name none. Raises: ConfigError."""
        return Acceptance(rule=self.accept, eps=self.accept_eps, delta=self.accept_delta)

    def scheme(self, role: str) -> Scheme | None:
        """Return the rope scheme of ``target`` or ``drafter``. Raises: ConfigError."""
        if self.rope is None:
            return None
        scheme = Scheme.parse(self.rope)
        if role == "drafter" and self.rope_drafter == "default":
            return Scheme(native=scheme.native, factor=scheme.factor)
        return scheme

    @classmethod
    def parse(cls, additional_config: Mapping[str, Any]) -> "PluginOptions":
        """Read the options out of vLLM's ``additional_config``. Raises: ConfigError, naming the field."""
        given = additional_config.get(NAME, {})
        if not isinstance(given, Mapping):
            raise ConfigError(f"additional_config[{NAME!r}] must be an object, not {type(given).__name__}.")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ConfigError(
                f"additional_config[{NAME!r}] has unknown options {', '.join(unknown)}. "
                f"Known: {', '.join(sorted(known))}."
            )
        return cls(**given)
