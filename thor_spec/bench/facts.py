"""What an arm really ran on, as seen at a start: its server's own words, the plan, the code, the machine."""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import thor_spec
from thor_spec import provenance
from thor_spec.bench.arms import FLAG, VARIABLE
from thor_spec.serve import metrics
from thor_spec.serve.client import Server
from thor_spec.serve.plan import Plan

_CACHE_LABELS = ("block_size", "cache_dtype", "enable_prefix_caching", "mamba_cache_mode", "mamba_ssm_cache_dtype")
_TOOL_TIMEOUT_S = 10
_VARYING_FLAGS = ("--port",)


def of_server(server: Server, plan: Plan | None) -> dict[str, Any]:
    """Return the facts of one start, flat and JSON-ready."""
    return {
        "vllm": server.version(),
        "served_model": server.model,
        "context": server.context,
        **_cache(server.metrics()),
        **of_plan(plan),
        "code": code_digest(),
        "power mode": power_mode(),
        **{f"package {name}": version for name, version in provenance.package_versions().items()},
        **{f"machine {name}": value for name, value in provenance.collect().machine.items()},
    }


def code_digest() -> str:
    """Return twelve hex digits over the sources of this package as they are now."""
    root = Path(thor_spec.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def power_mode() -> str | None:
    """Return the board's power mode as ``nvpmodel`` names it; None where there is no such tool."""
    try:
        # It asks before some changes, so it must never get our stdin.
        done = subprocess.run(
            ["nvpmodel", "-q"], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return " ".join(done.stdout.split()) or None


def of_plan(plan: Plan | None) -> dict[str, Any]:
    """Return what a start is asked for; nothing about a server that somebody else started."""
    if plan is None:
        return {}
    return {
        **{f"{FLAG}{name}": value for name, value in _flags(plan.argv).items() if name not in _VARYING_FLAGS},
        "target": _files(plan.target.path),
        "drafter": _files(plan.drafter.path) if plan.drafter else None,
        "draft_tokens": plan.draft_tokens,
        "context": plan.context,
        **{f"{VARIABLE}{name}": value for name, value in plan.environment.items()},
    }


def _flags(argv: tuple[str, ...]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    name = ""
    for part in argv:
        if part.startswith("--"):
            name, _, value = part.partition("=")
            flags[name] = value or True
        elif name:
            flags[name] = part
            name = ""
    return flags


def _files(folder: Path) -> str:
    """Return a digest over configuration and the names, sizes and times of the weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*")):
        if path.suffix == ".json":
            digest.update(path.read_bytes())
        elif path.is_file():
            digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()[:12]


def _cache(text: str) -> dict[str, Any]:
    labels = metrics.cache_config(text)
    return {f"cache {name}": labels[name] for name in _CACHE_LABELS if name in labels}
