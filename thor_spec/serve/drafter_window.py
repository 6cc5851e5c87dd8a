"""``--drafter-window``: whether it fits the drafter, and what the plugin is told."""

from typing import Any

from thor_spec.config import ServeConfig
from thor_spec.dflash.drafter import require_window
from thor_spec.errors import ConfigError
from thor_spec.serve.checkpoint import Checkpoint


def options(config: ServeConfig, drafter: Checkpoint | None, draft_tokens: int) -> dict[str, Any]:
    """Return the plugin's options. Raises: ConfigError (no drafter, too short a window, or one of the drafter's)."""
    if config.drafter_window is None:
        return {}
    if drafter is None:
        raise ConfigError("--drafter-window needs drafts. Name a drafter: --draft.")
    require_window(config.drafter_window, draft_tokens, drafter.config)
    return {"drafter_window": config.drafter_window}
