"""What the launcher asks of the plugin, carried in vLLM's ``additional_config["thor_spec"]``."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from thor_spec.config import RopeDrafter
from thor_spec.ddtree.shape import TreeShape
from thor_spec.dflash.acceptance import DELTA, EPS, Acceptance, Rule
from thor_spec.dflash.drafter import require_window
from thor_spec.diffusion import settings
from thor_spec.errors import ConfigError
from thor_spec.rope.scheme import Scheme

NAME = "thor_spec"  # the plugin's name in VLLM_PLUGINS and its key in additional_config
REQUEST_KEYS = {"thor_spec_accept": "accept", "thor_spec_eps": "accept_eps", "thor_spec_delta": "accept_delta"}
"""How a request's own rule travels in ``vllm_xargs``, which take flat values only."""
CONTROL_KEY = "thor_spec_control"
"""In ``vllm_xargs``: what is to be corrupted, where the server allows that."""
DENOISE_KEYS = {f"thor_spec_{name}": name for name in settings.FIELDS}
"""Likewise, to a block-diffusion model."""
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
    denoise: Mapping[str, Any] = field(default_factory=dict)
    """How blocks are denoised, unless a request says otherwise; see ``diffusion.settings``."""
    max_request_bytes: int = 8 << 20
    """Longest body that the API server reads."""
    controls: bool = False
    """Requests may ask for planted corruption; see ``controls``."""
    record: str = ""
    """File to which chat requests are written, see ``recorder``; empty: none."""
    record_contents: bool = False
    """Write their texts as they are."""
    state: State = "auto"
    """``reconstruct`` keeps one recurrent state per sequence, ``snapshot`` one per draft position as vLLM does;
    ``auto`` reconstructs where nothing forbids it."""
    gdn_kernel: GDNKernel = "auto"
    """How drafts are verified on Gated-DeltaNet layers with ``reconstruct``; see ``kernels.gdn_verify``. ``torch`` is
    for tests on a CPU."""
    drafter_window: int | None = None
    """Tokens that the drafter's layers attend to; None: all of them."""
    adaptive_drafts: bool = False
    """Draft as many tokens as pay, see ``drafting``; vLLM's schedule by batch size holds the numbers to choose from."""
    tree: str = "off"
    """Shape of draft trees; see ``ddtree.shape``."""
    rope: Mapping[str, Any] | None = None
    """A ``rope.scheme.Scheme``; None leaves vLLM's own tables."""
    rope_drafter: RopeDrafter = "same"
    """``default`` keeps the drafter's frequencies, in a table that is as long as the target's."""

    def __post_init__(self) -> None:
        for name, known in (("runner_kernels", RunnerKernels), ("state", State), ("gdn_kernel", GDNKernel)):
            if (value := getattr(self, name)) not in get_args(known):
                raise ConfigError(f"thor_spec.{name}={value!r} is not one of {', '.join(get_args(known))}.")

        if self.drafter_window is not None:
            require_window(self.drafter_window)
        if self.adaptive_drafts and self.tree_shape is not None:
            raise ConfigError(
                "thor_spec.adaptive_drafts chooses the length of chains; tree drafts none. Leave one out."
            )
        if self.rope_drafter not in get_args(RopeDrafter):
            raise ConfigError(
                f"thor_spec.rope_drafter={self.rope_drafter!r} is not one of {', '.join(get_args(RopeDrafter))}."
            )
        self.acceptance, self.denoising, self.tree_shape  # noqa: B018  # check their fields
        self.scheme("target")

    @property
    def acceptance(self) -> Acceptance:
        """The rule of requests that name none. Raises: ConfigError."""
        return Acceptance(rule=self.accept, eps=self.accept_eps, delta=self.accept_delta)

    @property
    def denoising(self) -> settings.Denoising:
        """The settings of requests that name none. Raises: ConfigError."""
        return settings.Denoising().of_request(self.denoise)

    def scheme(self, role: str) -> Scheme | None:
        """Return the rope scheme of ``target`` or ``drafter``. Raises: ConfigError."""
        if self.rope is None:
            return None
        scheme = Scheme.parse(self.rope)
        if role == "drafter" and self.rope_drafter == "default":
            return Scheme(native=scheme.native, factor=scheme.factor)
        return scheme

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
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ConfigError(
                f"additional_config[{NAME!r}] has unknown options {', '.join(unknown)}. "
                f"Known: {', '.join(sorted(known))}."
            )
        return cls(**given)
