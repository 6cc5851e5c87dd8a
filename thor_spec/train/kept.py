"""What an interrupted training goes on from: written whole or not at all, and told where it cannot be."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

from thor_spec.errors import ConfigError


def write(value: Any, file: Path) -> None:
    """Keep tensors. Raises: ConfigError, where they cannot be written."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        torch.save(value, partial)
        partial.replace(file)
    except (OSError, RuntimeError) as error:  # PyTorch's words for a full disk say nothing of a disk
        free = shutil.disk_usage(file.parent).free / 2**20
        partial.unlink(missing_ok=True)
        raise ConfigError(
            f"{file} cannot be written, with {free:,.1f} MiB free there. Make room and repeat the command with "
            "--resume, or name another folder with --out."
        ) from error


def read(file: Path) -> Any:
    """Return what was kept. Raises: ConfigError, where it is not whole."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{file} is not whole ({type(error).__name__}). Remove it, and repeat the command: what it held is made "
            "anew."
        ) from error
