"""A run's record: one JSON file in a folder of its own, with a schema, its provenance and its raw samples."""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thor_spec import json_text, provenance
from thor_spec.errors import ConfigError

SCHEMA = 1
FILE = "record.json"
FOLDER = Path("evidence")
_TREE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Record:
    """A record that was read."""

    path: Path
    content: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What kind of run it was."""
        return str(self.content["name"])

    @property
    def utc(self) -> str:
        """When it was written."""
        return str(self.content.get("provenance", {}).get("utc", "?"))


def require_folder(folder: Path) -> None:
    """Make the folder where it is missing, and see that files can be made in it. Raises: ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}). Name another folder with --out.") from error


def reserve(folder: Path | None = None) -> None:
    """See that ``write`` will find room in ``folder``, or in ``evidence``; call it before what takes long begins.

    Raises: ConfigError, where the folder cannot be written, or holds a record already.
    """
    if folder and (folder / FILE).exists():
        raise _taken(folder / FILE)
    require_folder(folder or FOLDER)


def write(
    name: str, result: Mapping[str, Any], *, folder: Path | None = None, seeds: Mapping[str, int] | None = None
) -> Path:
    """Write a record into ``folder``, or ``evidence/<utc>-<name>`` of the working directory; return the file.

    Raises: ConfigError, where the folder cannot be written, or holds a record already.
    """
    origin = provenance.collect(seeds)
    stamp = origin.utc.replace(":", "").replace("-", "")[:15]
    where = folder or FOLDER / f"{stamp}-{name}"
    path = where / FILE
    text = json.dumps({"schema": SCHEMA, "name": name, "provenance": origin.as_dict(), **result}, indent=1)
    try:
        where.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(without_places(text) + "\n")
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}). Name a folder with --out.") from error
    return path


def _taken(path: Path) -> ConfigError:
    return ConfigError(f"{path} is there already. Name another folder with --out.")


def read(path: Path) -> Record:
    """Read one record. Raises: ConfigError, if it is none, or of a newer schema."""
    try:
        content = json_text.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a record: {error}. Take it away, or name another folder.") from error
    if not isinstance(content, dict) or "name" not in content or not isinstance(content.get("schema"), int):
        raise ConfigError(f"{path} is not a record: it names no schema and name. Take it away, or name another folder.")
    if content["schema"] > SCHEMA:
        raise ConfigError(f"{path} is of schema {content['schema']}, this version reads up to {SCHEMA}. Update.")
    return Record(path, content)


def find(folder: Path) -> list[Record]:
    """Return the records in ``folder`` and below, oldest first. Raises: ConfigError, if there are none."""
    found = [read(path) for path in sorted(folder.rglob(FILE))]
    if not found:
        raise ConfigError(f"{folder} holds no {FILE}. Name the folder that a run wrote, or one above it.")
    return sorted(found, key=lambda record: record.utc)


def without_places(text: str) -> str:
    """Return the text without the folders of this machine, which say nothing to others."""
    for folder, name in ((_TREE, "."), (Path.home(), "~")):
        if folder == Path(folder.anchor):  # the home of some services: it would be found in every path and URL
            continue
        text = re.sub(re.escape(str(folder)) + r"(?![\w.-])", name, text)  # whole names only
    return text
