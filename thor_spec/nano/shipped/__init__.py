"""The trained checkpoints that come with the package, each in a folder of its name beside this file.

An installation without them has none; the tiny checkpoints serve then.
"""

import hashlib
import json
from pathlib import Path

FOLDER = Path(__file__).parent
MANIFEST = "manifest.json"
TARGET, DRAFTER, DIFFUSION = "nano-hybrid", "nano-dflash", "nano-llada"
NAMES = (TARGET, DRAFTER, DIFFUSION)


def find(name: str, folder: Path | None = None) -> Path | None:
    """Return the folder of the shipped checkpoint ``name``, or None where it is not shipped."""
    path = (folder or FOLDER) / name
    return path if name in NAMES and (path / "model.safetensors").is_file() else None


def drafter_of(model: str) -> str | None:
    """Return the shipped drafter of ``model``, if both are here."""
    return DRAFTER if model == TARGET and find(TARGET) and find(DRAFTER) else None


def default_model(otherwise: str) -> str:
    """Return what is served when no model is named: the shipped pair where there is one."""
    return TARGET if drafter_of(TARGET) else otherwise


def damaged(folder: Path | None = None) -> list[str]:
    """Return the files that are missing or not what the manifest says; nothing, where nothing is shipped."""
    root = folder or FOLDER
    if not (root / MANIFEST).is_file():
        return []
    wanted: dict[str, str] = json.loads((root / MANIFEST).read_text(encoding="utf-8"))["files"]
    return [name for name, digest in sorted(wanted.items()) if _digest(root / name) != digest]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
