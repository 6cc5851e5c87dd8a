"""Every touch on vLLM, by what it is for. Nothing else in the package imports from vLLM."""

import importlib.metadata
import logging
from types import ModuleType

from thor_spec.errors import PlatformError, SeamMovedError
from thor_spec.vllm_plugin.compat import (
    acceptance,
    cpu,
    diffusion,
    drafter,
    experts,
    one_state,
    rope,
    runner,
    scheduler,
    tree,
    whole,
)
from thor_spec.vllm_plugin.compat.acceptance import *  # noqa: F403
from thor_spec.vllm_plugin.compat.architectures import *  # noqa: F403
from thor_spec.vllm_plugin.compat.architectures import MODELS, model_seam
from thor_spec.vllm_plugin.compat.cpu import *  # noqa: F403
from thor_spec.vllm_plugin.compat.diffusion import *  # noqa: F403
from thor_spec.vllm_plugin.compat.drafter import *  # noqa: F403
from thor_spec.vllm_plugin.compat.experts import *  # noqa: F403
from thor_spec.vllm_plugin.compat.one_state import *  # noqa: F403
from thor_spec.vllm_plugin.compat.rope import *  # noqa: F403
from thor_spec.vllm_plugin.compat.runner import *  # noqa: F403
from thor_spec.vllm_plugin.compat.scheduler import *  # noqa: F403
from thor_spec.vllm_plugin.compat.tree import *  # noqa: F403
from thor_spec.vllm_plugin.compat.whole import *  # noqa: F403
from thor_spec.vllm_plugin.options import NAME
from thor_spec.vllm_plugin.seam import Seam, forget_sources, has_gpu_build, require_supported_version

PLUGIN_GROUP = "vllm.general_plugins"
API_SERVER = "vllm.entrypoints.openai.api_server"
COMMAND_LINE = "vllm.entrypoints.cli.main"
"""The module of the ``vllm`` program, which alone can start a node without an API."""
LOG = logging.getLogger("vllm.thor_spec")  # below vLLM's logger, and so in the engine's log


def seams(module: ModuleType) -> list[Seam]:
    """Return the seams that a module of this package lists."""
    return [value for value in vars(module).values() if isinstance(value, Seam)]


def problems() -> dict[Seam, str | None]:
    """Return what moved at each seam, or None where nothing did."""
    modules = (runner, acceptance, scheduler, one_state, drafter, tree, rope, diffusion, experts, whole)
    places = [place for module in modules + (() if has_gpu_build() else (cpu,)) for place in seams(module)]
    try:
        return {place: place.problem() for place in (*places, *(model_seam(name) for name in MODELS))}
    finally:
        forget_sources()


def require_seams() -> str:
    """Return vLLM's version. Raises: PlatformError outside the supported range; SeamMovedError, naming what moved."""
    found = require_supported_version()
    if moved := [problem for problem in problems().values() if problem]:
        more = f" ({len(moved) - 1} more: see `thor-spec doctor`)" if len(moved) > 1 else ""
        raise SeamMovedError(moved[0] + more)
    return found


def plugin_entry() -> str | None:
    """Return what vLLM would load as our plugin, or None where we are not registered with it."""
    entries = importlib.metadata.entry_points(group=PLUGIN_GROUP, name=NAME)
    return next((entry.value for entry in entries), None)


def require_plugin() -> None:
    """Raise PlatformError where vLLM would start without us."""
    if plugin_entry() is None:
        raise PlatformError(
            "thor-spec is not registered with vLLM in this environment, so vLLM would start without it. "
            "Install it into the environment that runs vLLM: `pip install -e .`, or run `make serve` once."
        )
