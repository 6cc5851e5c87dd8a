"""Where profiles lie: those that came with the package, and the user's own, which win."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thor_spec import env
from thor_spec.config import read_profile
from thor_spec.errors import ConfigError
from thor_spec.profiles.document import read
from thor_spec.profiles.profile import Profile, load

BUNDLED = Path(__file__).parent / "bundled"


def user_folder() -> Path:
    """Return where the user's profiles lie; it need not exist."""
    return env.config_dir() / "profiles"


def paths() -> dict[str, Path]:
    """Return every profile file by name."""
    files = [*sorted(BUNDLED.glob("*.yaml")), *sorted(user_folder().glob("*.yaml"))]
    return {file.stem: file for file in files}


def find(name: str) -> Path | None:
    """Return the profile file of a name, or of a path that ends in .yaml; None where it is neither."""
    if name.endswith((".yaml", ".yml")):
        return Path(name).expanduser()
    return paths().get(name)


def load_all() -> list[Profile]:
    """Return every profile. Raises: ConfigError, for the first that is not whole."""
    return [load(path) for path in paths().values()]


def get(name: str) -> Profile:
    """Return the profile of a name or path. Raises: ConfigError."""
    path = find(name)
    if path is None:
        raise ConfigError(f"There is no profile {name}. Known: {', '.join(paths())}. Your own go to {user_folder()}.")
    return load(path)


def layered(names: Sequence[str]) -> Path | Mapping[str, Any] | None:
    """Return what ``thor-spec serve`` takes from several profiles, later ones over earlier ones; None for none.

    Arguments for vLLM and variables of all of them are kept. Raises: ConfigError.
    """
    found = [serve_options(name) for name in names]
    if len(found) < 2:
        return found[0] if found else None
    merged: dict[str, Any] = {}
    for options in found:
        values = read_profile(options) if isinstance(options, Path) else dict(options)
        if "vllm_args" in values:
            values["vllm_args"] = (*merged.get("vllm_args", ()), *values["vllm_args"])
        if "environment" in values:
            values["environment"] = {**merged.get("environment", {}), **values["environment"]}
        merged |= values
    return merged


def serve_options(name: str) -> Path | Mapping[str, Any]:
    """Return what ``thor-spec serve --profile`` takes from a profile; a plain file of options is returned as its path.

    Raises: ConfigError.
    """
    path = find(name) or Path(name).expanduser()
    if not path.exists() and path.name == name:
        path = get(name).path  # says which there are
    if path.is_file() and isinstance(content := read(path).content, dict) and "schema" in content:
        return load(path).options()
    return path
