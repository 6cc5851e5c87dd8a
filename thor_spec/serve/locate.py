"""From what a user typed to a checkpoint folder, without the network."""

import os
from collections.abc import Callable
from pathlib import Path

from thor_spec.errors import ConfigError
from thor_spec.nano import checkpoints as nano
from thor_spec.nano import shipped


def locate(name: str, note: Callable[[str], None] | None = None) -> Path:
    """Return the folder of ``name``: a path, a bundled model (tiny ones are made on first use), or a cached repository.

    Raises: ConfigError, when nothing local answers to the name.
    """
    if name in nano.NAMES:
        if note and not nano.is_made(name):
            note(f"Making the bundled model {name}, once; this takes about half a minute.")
        return nano.ensure(name)
    if folder := shipped.find(name):
        return folder
    path = Path(name).expanduser()
    if name in shipped.NAMES and not os.path.exists(path):
        raise ConfigError(f"{name} did not come with this installation. docs/nano.md says how to train it.")
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or os.path.exists(path):  # Path.exists may be refused
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(str(snapshot_download(name, local_files_only=True)))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"{name} is neither a folder here nor in the local Hugging Face cache; serving never downloads. "
            f"Run `hf download {name}` first, or pass a folder."
        ) from error
