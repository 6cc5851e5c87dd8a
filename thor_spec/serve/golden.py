"""Answers that an engine once gave and must give again: read before a start, compared by the canary."""

from pathlib import Path

from thor_spec import json_text
from thor_spec.errors import ConfigError

Golden = tuple[tuple[str, str], ...]
"""Prompts, each with the beginning of its greedy answer."""


def read(path: Path) -> Golden:
    """Return the answers in a JSON list of ``{"prompt": …, "text": …}``. Raises: ConfigError."""
    try:
        content = json_text.whole(json_text.loads(path.read_text(encoding="utf-8")))
        found = tuple((item["prompt"], item["text"]) for item in content)
        if not all(isinstance(part, str) for pair in found for part in pair):
            raise TypeError("what is asked and answered is text")
    except OSError as error:
        raise ConfigError(f"The golden answers {path} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f'The golden answers {path} must be a JSON list of {{"prompt": …, "text": …}} ({error}).'
        ) from error
    if not found:
        raise ConfigError(f"The golden answers {path} are empty. Leave the option out instead.")
    return found
