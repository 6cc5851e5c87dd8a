"""Where the corpus comes from: packages by name and version, each with its hash and licence.

Everything is fetched with the ordinary clients (pip, apt-get) into one folder, and only there; what lies in that folder
already is not fetched again. The hashes are pinned in ``sources.json``.
"""

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_REMEDIES = {
    "debian": "Run `apt-get update` and try again. What Debian has replaced since is kept by snapshot.debian.org: put "
    "that archive into the folder.",
    "pypi": "Is the package index within reach? `pip download` said above what it met.",
}
PINS = Path(__file__).with_name("sources.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One package of the corpus."""

    kind: Literal["pypi", "debian", "stdlib"]
    name: str
    version: str
    licence: str
    sha256: str = ""
    """Of the archive; empty for the standard library, whose files are hashed one by one in the manifest."""

    @property
    def pattern(self) -> str:
        """Return the glob of the archive's file name."""
        return f"{self.name}_*.deb" if self.kind == "debian" else f"{self.name}-{self.version}.tar.gz"


def pinned() -> list[Source]:
    """Return the sources of the corpus, in the order of ``sources.json``."""
    return [Source(**entry) for entry in json.loads(PINS.read_text(encoding="utf-8"))]


def fetch(sources: list[Source], folder: Path) -> dict[str, Path]:
    """Return the archive of every packaged source, by name, fetching those that ``folder`` lacks.

    Raises: SystemExit, when a package cannot be had or is not the pinned one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    archives = {}
    for source in sources:
        if source.kind == "stdlib":
            continue
        if not (found := sorted(folder.glob(source.pattern))):
            _download(source, folder)
            found = sorted(folder.glob(source.pattern))
        if not found:
            sys.exit(f"{source.name} {source.version} could not be fetched into {folder}. {_REMEDIES[source.kind]}")
        digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
        if digest != source.sha256:
            sys.exit(f"{found[0].name} has sha256 {digest}, not the pinned {source.sha256}.")
        archives[source.name] = found[0]
    return archives


def _download(source: Source, folder: Path) -> None:
    if source.kind == "debian":
        command = ["apt-get", "download", "-qq", f"{source.name}={source.version}"]
    else:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=:all:", "-d", "."]
        command.append(f"{source.name}=={source.version}")
    subprocess.run(command, cwd=folder, check=False)
