"""What a command was asked to do: frozen, checked where it is built, and explicit about where each value came from.

Precedence is flag, profile file, default. The resolved configuration is what gets printed and stored with results.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from thor_spec.errors import ConfigError
from thor_spec.sizes import SIZES, parse_size

Origin = Literal["flag", "profile", "default"]
CanarySet = Literal["quick", "full"]
RopeDrafter = Literal["same", "default"]

CONTROLS = {
    "state-slot": "the recurrent state that a step starts from has the wrong sign, in one layer",
    "conv-window": "the convolution window is that of the step before, in one layer",
    "kv-rows": "two tokens' cache rows are swapped",
    "position": "positions move one too far with every step",
    "accepted-length": "the next step starts from the state one token off",
    "blind-draft": "every draft is taken, whatever the target says",
    "bonus-token": "the token after the last draft is not the best one",
    "sharpened": "logits are scaled by 1.5, which a greedy answer does not show",
}
"""What a request may have corrupted where the server was started with ``allow_controls``; gates must see it."""
CACHED_CONTROLS = {
    "cached-state": "the cached recurrent state that a request goes on from has the wrong sign, in one layer",
    "cached-window": "the cached convolution window has, in one layer",
    "cached-keys": "the cached keys and values have, in one layer of the target",
    "cached-drafts": "the cached keys and values of the drafter have, which changes no token: acceptance falls",
}
"""The same where prefixes are cached; a request must name a ``cache_salt``, so that nobody else is given any of it."""
DEFAULT_MODEL = "tiny-hybrid"
DEFAULT_DRAFT_TOKENS = 7
HIDDEN = "(hidden)"
OF_DRAFTS = (
    "draft_tokens", "accept", "accept_eps", "accept_delta", "acceptance_floor", "adaptive_drafts", "tree", "state",
    "gdn_kernel", "drafter_window", "rope_drafter",
)  # fmt: skip
"""Options that say something about drafts; without a drafter they mean nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """What ``thor-spec serve`` starts."""

    model: str = DEFAULT_MODEL
    """A checkpoint folder, a name that the local Hugging Face cache holds, or a bundled tiny model."""
    draft: str | None = None
    """Drafter, named like ``model``; ``none`` serves without speculation; None takes the model's own, if bundled."""
    draft_tokens: int | None = None
    """Tokens drafted per step, K; None takes the drafter's block size - 1, at most 7 without a GPU."""
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    """Clients must show it. Prefer a file: a command line can be read by every user of the machine."""
    api_key_file: Path | None = None
    """Holds the key in one line, and may be read by its owner alone."""
    insecure: bool = False
    """Listen on an address that others reach without a key; let vLLM log prompts."""
    max_request_bytes: int | None = None
    """Longest body of a request; None takes 8 MiB."""
    context: int | None = None
    """Longest request, prompt and answer together, in tokens; None takes the model's own."""
    max_seqs: int = 8
    kv_cache_memory: int | None = None
    """Bytes of KV cache; None leaves the size to vLLM on a GPU, and takes 1 GiB without one."""
    memory_floor: int | None = None
    """Bytes of MemAvailable below which the engine is killed; None takes 4 GiB, or 3 % of all memory if more."""
    accept: str | None = None
    """Rule for drafts of requests that name none: ``exact`` (None), or the lossy ``threshold`` and ``typical``."""
    accept_eps: float | None = None
    """Threshold of relaxed rules, a probability; None takes 0.09."""
    accept_delta: float | None = None
    """Factor of the threshold of ``typical``; None takes 0.3."""
    state: str | None = None
    """Recurrent states kept per sequence when drafts are verified: ``reconstruct``, one, or ``snapshot``, one per draft
    position; None takes one where nothing forbids it."""
    gdn_kernel: str | None = None
    """How drafts are verified on Gated-DeltaNet layers with one state: ``replay``, ``wy``, or ``auto`` (None)."""
    drafter_window: int | None = None
    """Tokens, the last ones, that the drafter attends to and keeps a cache of; None: all."""
    mode: str | None = None
    """Of a block-diffusion model: ``quality`` (None), ``speed`` or ``2.0`` name both thresholds."""
    threshold: float | None = None
    """Of a block-diffusion model: probability above which a mask is filled."""
    edit_threshold: float | None = None
    """Of a block-diffusion model: probability above which a token is replaced; 1 replaces none."""
    max_denoise_steps: int | None = None
    """Of a block-diffusion model: steps after which a block is filled whatever the thresholds say."""
    rope: str | None = None
    """How positions are told apart; None leaves it to the checkpoint. See ``rope.scheme``."""
    rope_native: int | None = None
    """Context that the model was trained with, in tokens; None reads it from the checkpoint."""
    rope_factor: float | None = None
    """How many times the native context is usable; None takes 1."""
    rope_factors: Path | None = None
    """JSON file of LongRoPE's factors: a list, or ``short_factor`` and ``long_factor``."""
    rope_drafter: RopeDrafter | None = None
    """``same`` (None) rotates the drafter as the target, ``default`` leaves its frequencies."""
    adaptive_drafts: bool = False
    """Draft as many tokens as pay at the current depth and batch, at most ``draft_tokens``, and none where none do."""
    tree: str | None = None
    """Draft trees instead of chains: ``auto``, ``N``, ``N,DEPTH`` or widths by level; ``off`` or None drafts chains."""
    canary: CanarySet | None = None
    """``quick`` or ``full``: what the engine must answer before READY; None takes full on a GPU, quick without."""
    dummy_weights: bool = False
    """Serve random weights, for measurements of hardware. Nothing is asked before READY: no answer could be right."""
    synthetic_acceptance: float | None = None
    """Tokens per verify step that the engine pretends to accept, whatever it drafts; only with dummy weights."""
    acceptance_floor: float | None = None
    """Least tokens per verify step in the canary, e.g. 2.0; None asks for any draft at all."""
    golden: Path | None = None
    """JSON file of prompts and the beginnings of their greedy answers, which the canary compares."""
    allow_controls: bool = False
    """Let requests ask for planted corruption, on which gates prove themselves. Never for a server that others use."""
    record: Path | None = None
    """File to which chat requests are appended, for ``bench agent``; texts are replaced by letters drawn from them."""
    record_contents: bool = False
    """Record the texts as they are."""
    log_file: Path | None = None
    wait: bool = False
    """Wait for the device instead of exiting when another job holds it."""
    tensor_parallel: int | None = None
    """Devices that share each layer; with ``pipeline_parallel`` and ``data_parallel`` vLLM's own."""
    pipeline_parallel: int | None = None
    data_parallel: int | None = None
    nnodes: int | None = None
    """Machines that share one engine."""
    node_rank: int | None = None
    """Which of them this is; all but 0 have no API."""
    master_addr: str | None = None
    executor: str | None = None
    """How vLLM reaches its workers: ``mp`` or ``ray``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables set for the engine beside ours, which a file may not change."""
    vllm_args: tuple[str, ...] = ()
    """Passed to vLLM as they are."""

    def __post_init__(self) -> None:
        if self.draft_tokens is not None and self.draft_tokens <= 0:
            raise ConfigError(
                f"--draft-tokens {self.draft_tokens} must be at least 1. To serve without speculation: --draft none."
            )
        if self.adaptive_drafts and self.acceptance_floor is not None:
            raise ConfigError("--acceptance-floor asks for drafts that --adaptive-drafts may leave out. Leave one out.")
        if self.draft == "none" and self.adaptive_drafts:
            raise ConfigError("--adaptive-drafts has no meaning with --draft none. Leave one of them out.")
        if self.draft == "none" and self.draft_tokens is not None:
            raise ConfigError("--draft-tokens has no meaning with --draft none. Leave one of them out.")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is not a port. Take one in 1..65535.")
        if self.canary is not None and self.canary not in get_args(CanarySet):
            raise ConfigError(f"--canary {self.canary} is not one of {', '.join(get_args(CanarySet))}.")
        if self.synthetic_acceptance is not None and not self.dummy_weights:
            raise ConfigError("synthetic_acceptance needs dummy_weights: answers of a real model would be garbage.")
        for name, known in (("state", ("reconstruct", "snapshot")), ("gdn_kernel", ("auto", "replay", "wy"))):
            if (given := getattr(self, name)) is not None and given not in known:
                raise ConfigError(f"--{name.replace('_', '-')} {given} is not one of {', '.join(known)}.")
        if self.state == "snapshot" and self.gdn_kernel is not None:
            raise ConfigError("--gdn-kernel has no meaning with --state snapshot. Leave one of them out.")
        if self.rope_drafter is not None and self.rope_drafter not in get_args(RopeDrafter):
            raise ConfigError(f"--rope-drafter {self.rope_drafter} is not one of {', '.join(get_args(RopeDrafter))}.")
        if self.record_contents and self.record is None:
            raise ConfigError("--record-contents goes with --record. Name the file there, or leave it out.")
        if self.acceptance_floor is not None and self.acceptance_floor < 1:
            raise ConfigError(
                f"--acceptance-floor {self.acceptance_floor:g} must be at least 1: each verify step emits a token."
            )
        if self.acceptance_floor is not None and self.draft == "none":
            raise ConfigError("--acceptance-floor has no meaning with --draft none. Leave one of them out.")
        if self.memory_floor is not None and self.memory_floor < 0:
            raise ConfigError(f"--memory-floor {self.memory_floor} must not be negative.")
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError("--api-key and --api-key-file exclude each other. Leave one of them out.")
        if self.node_rank is not None and self.node_rank < 0:
            raise ConfigError(f"--node-rank {self.node_rank} must not be negative.")
        positive = ("rope_native", "context", "max_seqs", "kv_cache_memory", "max_request_bytes")
        for name in (*positive, "tensor_parallel", "pipeline_parallel", "data_parallel", "nnodes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be positive.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A configuration together with the origin of each of its values."""

    config: ServeConfig
    origins: Mapping[str, Origin]

    def as_dict(self) -> dict[str, Any]:
        """Return ``{name: {"value": …, "origin": …}}``, JSON-ready, and with no key in it."""
        values = asdict(self.config)
        if values["api_key"] is not None:
            values["api_key"] = HIDDEN
        return {
            name: {"value": str(value) if isinstance(value, Path) else value, "origin": self.origins[name]}
            for name, value in values.items()
        }


def resolve(
    flags: Mapping[str, Any],
    profile: Path | Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Resolved:
    """Merge ``flags`` over the profile over the defaults. Arguments for vLLM from both are kept, the flags' last.

    ``draft="none"`` among the flags takes with it what a profile says about drafts.

    Args:
        flags: value by field name; None stands for a flag that was not given.
        profile: a YAML file, a mapping of the same names, with ``-`` or ``_``; or such values, already read.
        defaults: in place of this module's own, by field name.

    Raises: ConfigError, naming the file and the field.
    """
    named = read_profile(profile) if isinstance(profile, Path) else dict(profile or {})
    given = {name: value for name, value in flags.items() if value is not None}
    if given.get("vllm_args") and named.get("vllm_args"):
        given["vllm_args"] = (*named["vllm_args"], *given["vllm_args"])
    if given.get("draft") == "none":
        named = {name: value for name, value in named.items() if name not in OF_DRAFTS}
    known = [known.name for known in fields(ServeConfig)]
    origins: dict[str, Origin] = {
        name: "flag" if name in given else "profile" if name in named else "default" for name in known
    }
    return Resolved(config=ServeConfig(**{**(defaults or {}), **named, **given}), origins=origins)


def read_profile(path: Path) -> dict[str, Any]:
    """Return the options in a plain YAML file, by field name. Raises: ConfigError, naming the file and the field."""
    import yaml  # here, because every command imports this module and few read a profile

    try:
        text = path.read_text(encoding="utf-8")
        content, written = yaml.safe_load(text), yaml.load(text, Loader=yaml.BaseLoader)  # strings only
    except OSError as error:
        raise ConfigError(f"The profile {path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"The profile {path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"The profile {path} must hold a mapping of option names to values.")
    values, texts = ({str(name).replace("-", "_"): value for name, value in of.items()} for of in (content, written))
    return typed(values, texts, where=str(path))


def typed(written: Mapping[str, Any], texts: Mapping[str, str], *, where: str) -> dict[str, Any]:
    """Return options as ``ServeConfig`` takes them. Raises: ConfigError, naming the place and the field.

    Args:
        written: as YAML reads them: sizes and paths are texts, ``tree: off`` is false.
        texts: the same as they were written.
        where: what the message begins with.
    """
    values = dict(written)
    for name, value in values.items():
        expected = _PROFILE_TYPES.get(name)
        if expected is None:
            raise ConfigError(f"{where}: unknown option {name!r}. Known: {', '.join(sorted(_PROFILE_TYPES))}.")
        if name in SIZES and isinstance(value, str):
            try:
                value = values[name] = parse_size(value)
            except ValueError as error:
                raise ConfigError(f"{where}: {name}: {error}.") from error
        if expected is float and isinstance(value, int) and not isinstance(value, bool):
            value = values[name] = float(value)
        if name in _PATHS and isinstance(value, bool):  # the flag of the same name wants a file
            raise ConfigError(f"{where}: {name} must name a file, not {texts[name]}.")
        if expected is str and isinstance(value, bool | int | float):  # `tree: off` and `tree: 15` are texts to us
            value = values[name] = texts[name]
        if not isinstance(value, expected) or isinstance(value, bool) != (expected is bool):
            raise ConfigError(f"{where}: {name} must be {expected.__name__}, not {type(value).__name__}.")
    for name in _PATHS:
        if name in values:
            values[name] = Path(values[name])
    if "environment" in values:
        values["environment"] = {str(name): str(value) for name, value in values["environment"].items()}
    if "vllm_args" in values:
        values["vllm_args"] = tuple(str(item) for item in values["vllm_args"])
    return values


_PATHS = ("log_file", "golden", "api_key_file", "rope_factors", "record")
_PROFILE_TYPES: dict[str, type] = {
    "model": str,
    "draft": str,
    "draft_tokens": int,
    "host": str,
    "port": int,
    "api_key_file": str,
    "insecure": bool,
    "max_request_bytes": int,
    "context": int,
    "max_seqs": int,
    "kv_cache_memory": int,
    "memory_floor": int,
    "accept": str,
    "accept_eps": float,
    "accept_delta": float,
    "state": str,
    "gdn_kernel": str,
    "drafter_window": int,
    "mode": str,
    "threshold": float,
    "edit_threshold": float,
    "max_denoise_steps": int,
    "rope": str,
    "rope_native": int,
    "rope_factor": float,
    "rope_factors": str,
    "rope_drafter": str,
    "adaptive_drafts": bool,
    "tree": str,
    "canary": str,
    "acceptance_floor": float,
    "golden": str,
    "allow_controls": bool,
    "record": str,
    "record_contents": bool,
    "log_file": str,
    "wait": bool,
    "tensor_parallel": int,
    "pipeline_parallel": int,
    "data_parallel": int,
    "nnodes": int,
    "node_rank": int,
    "master_addr": str,
    "executor": str,
    "environment": dict,
    "vllm_args": list,
}
