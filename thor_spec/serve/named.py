"""The checkpoint of MODEL or ``--draft``; where none is there, what the name may have been meant for."""

from collections.abc import Callable
from pathlib import Path

from thor_spec.config import Origin
from thor_spec.errors import ConfigError
from thor_spec.profiles import catalogue
from thor_spec.serve.checkpoint import Checkpoint, open_checkpoint
from thor_spec.serve.locate import locate


def open_named(name: str, option: str, origin: Origin, note: Callable[[str], None] | None) -> Checkpoint:
    """Return the checkpoint of a name.

    Args:
        option: that takes such a name, as users write it.
        origin: where this one comes from.

    Raises: ConfigError, as ``locate`` and ``open_checkpoint`` do.
    """
    try:
        return open_checkpoint(name, locate(name, note))
    except ConfigError as error:
        if not Path(name).expanduser().exists() and (hint := _hint(name, option, origin)):
            raise ConfigError(f"{error} {hint}") from error
        raise


def _hint(name: str, option: str, origin: Origin) -> str:
    if origin == "profile":
        return f"The profile names {name}, for a folder of yours: give {option} on the command line, which wins."
    if name in catalogue.paths():
        return f"There is a profile of that name: --profile {name}, with your folder as {option}."
    return ""
