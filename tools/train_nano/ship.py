"""Puts trained checkpoints into the package: what serving needs, the cards, and a manifest of hashes."""

import hashlib
import json
from pathlib import Path

from thor_spec.nano import shipped

LIMIT = 24_000_000  # bytes, all three together
LEFT = ("metrics.json",)  # goes into evidence, not into the package


def ship(trained: Path, package: Path = shipped.FOLDER) -> str:
    """Copy the checkpoints that ``trained`` holds into ``package`` and return a line about them.

    Raises: SystemExit, for a smoke-sized checkpoint, or when the three do not fit.
    """
    files: dict[str, bytes] = {}
    for name in shipped.NAMES:
        folder = trained / name
        if not folder.is_dir():
            continue
        if json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["smoke"]:
            raise SystemExit(f"{folder} is of smoke size; only full trainings are shipped.")
        for path in sorted(folder.iterdir()):
            if path.name not in LEFT:
                files[f"{name}/{path.name}"] = path.read_bytes()
    size = sum(map(len, files.values()))
    if not files or size > LIMIT:
        raise SystemExit(f"{trained} gives {size:,} bytes, allowed are 1 to {LIMIT:,}.")
    for name, content in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(content)
    kept = {path.relative_to(package).as_posix() for path in package.glob("nano-*/*")}
    digests = {name: hashlib.sha256((package / name).read_bytes()).hexdigest() for name in sorted(kept)}
    text = json.dumps({"schema": 1, "files": digests}, indent=1) + "\n"
    (package / shipped.MANIFEST).write_text(text, encoding="utf-8")
    return f"{len(files)} files, {size:,} bytes, into {package}"
