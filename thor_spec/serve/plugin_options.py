"""What our plugin is told of a start, in vLLM's ``--additional-config``."""

from typing import Any

from thor_spec.config import ServeConfig
from thor_spec.dflash.acceptance import Acceptance
from thor_spec.dflash.drafter import require_window
from thor_spec.diffusion.settings import FIELDS as DENOISING_FIELDS
from thor_spec.diffusion.settings import Denoising
from thor_spec.errors import ConfigError
from thor_spec.rope.scheme import Scheme
from thor_spec.serve import passthrough, rope, speculation
from thor_spec.serve.checkpoint import Checkpoint

ACCEPTANCE_FIELDS = ("accept", "accept_eps", "accept_delta")


def make(
    config: ServeConfig,
    target: Checkpoint,
    drafter: Checkpoint | None,
    draft_tokens: int,
    scheme: Scheme | None,
    *,
    gpu: bool,
) -> dict[str, Any]:
    """Return the fields of ``PluginOptions`` that are not its defaults. Raises: ConfigError, for what cannot work."""
    relaxation = acceptance(config)
    if relaxation and drafter is None:
        raise _needs_drafts(_flag(relaxation))
    Acceptance().of_request(relaxation)  # checks it
    blocks = denoising(config)
    Denoising().of_request(blocks)  # likewise
    options: dict[str, Any] = {
        **relaxation,
        **_state(config, target, passed=config.vllm_args, drafter=drafter),
        **_drafter_window(config, drafter, draft_tokens),
        **rope.options(config, scheme),
    }
    if blocks:
        options["denoise"] = blocks
    if speculation.tree(config) is not None:
        options["tree"] = config.tree
    if config.adaptive_drafts:
        options["adaptive_drafts"] = True
    if not gpu:
        options["runner_kernels"] = "torch"
    if config.max_request_bytes is not None:
        options["max_request_bytes"] = config.max_request_bytes
    if config.allow_controls:
        options["controls"] = True
    if config.record is not None:
        options |= {"record": str(config.record.absolute()), "record_contents": config.record_contents}
    return options


def acceptance(config: ServeConfig) -> dict[str, Any]:
    """Return what was said of the rule by which drafts are taken."""
    return _given(config, ACCEPTANCE_FIELDS)


def denoising(config: ServeConfig) -> dict[str, Any]:
    """Return what was said of how blocks are denoised."""
    return _given(config, DENOISING_FIELDS)


def _state(
    config: ServeConfig, target: Checkpoint, *, passed: tuple[str, ...], drafter: Checkpoint | None
) -> dict[str, Any]:
    given = _given(config, ("state", "gdn_kernel"))
    if not given:
        return {}
    flag = _flag(given)
    if not target.is_hybrid:
        raise ConfigError(f"{flag} is about recurrent state, and {config.model} has none. Leave it out.")
    if drafter is None and not passthrough.mentions(passed, "--speculative-config"):
        raise _needs_drafts(flag)
    return given


def _drafter_window(config: ServeConfig, drafter: Checkpoint | None, draft_tokens: int) -> dict[str, Any]:
    if config.drafter_window is None:
        return {}
    if drafter is None:
        raise _needs_drafts("--drafter-window")
    require_window(config.drafter_window, draft_tokens, drafter.config)
    return {"drafter_window": config.drafter_window}


def _needs_drafts(flag: str) -> ConfigError:
    return ConfigError(f"{flag} needs drafts. Name a drafter: --draft.")


def _flag(given: dict[str, Any]) -> str:
    """Return the first of them as it is written on the command line."""
    return f"--{next(iter(given)).replace('_', '-')}"


def _given(config: ServeConfig, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(config, name)) is not None}
