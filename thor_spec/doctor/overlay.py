"""What an image differs in from the image it was built on, by checksums of the base's Python packages.

    python3 overlay.py record MANIFEST BASE FOLDER...

The first step of a build writes the manifest, before anything of ours is installed; `thor-spec doctor --container`
compares. Standard library only, and no import of ours: it runs in the bare base image.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MANIFEST = "/usr/share/thor-spec/base.json"
_OURS = ("thor_spec", "thor-spec")
_SKIPPED = (".pyc", ".pyo")


class Difference(NamedTuple):
    """One file. ``how``: changed, removed or added."""

    how: str
    path: str


def record(base: str, folders: Iterable[str]) -> dict[str, object]:
    """Return the manifest of all files below the folders."""
    roots = sorted(os.path.realpath(folder) for folder in folders)
    return {"schema": 1, "base": base, "folders": roots, "files": {path: _digest(path) for path in _files(roots)}}


def compare(manifest: dict[str, object]) -> list[Difference]:
    """Return how the files are now against the manifest, without what is ours. Raises: ValueError, if it is none."""
    files, folders = manifest.get("files"), manifest.get("folders")
    if not isinstance(files, dict) or not isinstance(folders, list):
        raise ValueError("no list of files")
    here = {path: path for path in _files(folders)}
    found = [Difference("removed", path) for path in files if path not in here]
    found += [Difference("added", path) for path in here if path not in files]
    found += [Difference("changed", path) for path in here if path in files and _digest(path) != files[path]]
    return sorted(found)


def _files(folders: Iterable[str]) -> Iterator[str]:
    for folder in folders:
        for parent, names, leaves in os.walk(folder):
            names[:] = sorted(name for name in names if name != "__pycache__" and not name.startswith(_OURS))
            for leaf in sorted(leaves):
                path = os.path.join(parent, leaf)
                if not leaf.endswith(_SKIPPED) and not leaf.startswith(_OURS) and os.path.isfile(path):
                    yield path


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str]) -> int:
    """Write the manifest; return an exit status."""
    if len(arguments) < 4 or arguments[0] != "record":
        sys.stderr.write("usage: overlay.py record MANIFEST BASE FOLDER...\n")
        return 2
    _, target, base, *folders = arguments
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(target, "w", encoding="utf-8") as file:
        json.dump(record(base, folders), file)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
