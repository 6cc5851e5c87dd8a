"""A ``config.json`` from a folder, without its weights."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thor_spec import json_text
from thor_spec.errors import ConfigError


def closed(path: Path) -> ConfigError:
    """Return what to tell of a file or folder that is there and that this user may not read."""
    return ConfigError(
        f"{path} may not be read by you (uid {os.getuid()}). What is in it may be sound: let its owner run "
        f"`chmod -R a+rX` on the checkpoint's folder, which you must be able to enter, or make it yours with "
        "`sudo chown -R`."
    )


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the configuration in a folder, or in a JSON file. Raises: ConfigError."""
    file = path
    try:
        file = path / "config.json" if path.is_dir() else path
        config = json_text.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"There is no {file}. Pass a folder that holds a config.json, or a profile.") from error
    except PermissionError as error:
        raise closed(file) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}). Download it again.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold a JSON object. Take the config.json of the published checkpoint.")
    return config
