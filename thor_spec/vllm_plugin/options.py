"""What the launcher asks of the plugin, carried in vLLM's ``additional_config["thor_spec"]``."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from thor_spec.ddtree.shape import TreeShape
from thor_spec.dflash.acceptance import DELTA, EPS, Acceptance, Rule
from thor_spec.errors import ConfigError

NAME = "thor_spec"  # the plugin's name in VLLM_PLUGINS and its key in additional_config
REQUEST_KEYS = {"thor_spec_accept": "accept", "thor_spec_eps": "accept_eps", "thor_spec_delta": "accept_delta"}
"""How a request's own rule travels in ``vllm_xargs``, which take flat values only."""
CONTROL_KEY = "thor_spec_control"
"""In ``vllm_xargs``: what is to be corrupted, where the server allows that."""
TREE_KEY = "thor_spec_tree"
TREES = ("on", "chain")
"""Whether a request drafts what the server does; in ``vllm_xargs``, where it does not."""
RunnerKernels = Literal["triton", "torch"]
State = Literal["auto", "reconstruct", "snapshot"]
GDNKernel = Literal["auto", "replay", "wy", "torch"]


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
    controls: bool = False
    """Requests may ask for planted corruption; see ``controls``."""
    state: State = "auto"
    """``reconstruct`` keeps one recurrent state per sequence, ``snapshot`` one per draft position as vLLM does;
    ``auto`` reconstructs where nothing forbids it."""
    gdn_kernel: GDNKernel = "auto"
    """How drafts are verified on Gated-DeltaNet layers with ``reconstruct``; see ``kernels.gdn_verify``. ``torch`` is
    for tests on a CPU."""
    tree: str = "off"
    """Shape of draft trees; see ``ddtree.shape``."""

    def __post_init__(self) -> None:
        for name, known in (("runner_kernels", RunnerKernels), ("state", State), ("gdn_kernel", GDNKernel)):
            if (value := getattr(self, name)) not in get_args(known):
                raise ConfigError(f"thor_spec.{name}={value!r} is not one of {', '.join(get_args(known))}.")

        self.acceptance, self.tree_shape  # noqa: B018  # check their fields

    @property
    def acceptance(self) -> Acceptance:
        """The rule of requests that name none. Raises: ConfigError."""
        return Acceptance(rule=self.accept, eps=self.accept_eps, delta=self.accept_delta)

    @property
    def tree_shape(self) -> TreeShape | None:
        """The shape of trees; None: chains. Raises: ConfigError."""
        return TreeShape.parse(self.tree)

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
