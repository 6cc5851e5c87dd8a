"""Engines that a command starts for itself and stops again, on a port of their own."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thor_spec.cli.notes import note
from thor_spec.config import DEFAULT_MODEL, resolve
from thor_spec.errors import ConfigError

if TYPE_CHECKING:
    from thor_spec.gates.judging import Planned


def require_none_to_start(url: str | None, given: Sequence[str]) -> None:
    """Raise ConfigError, where a server that runs is also told how to start; ``given`` is what was said of that."""
    if url and given:
        raise ConfigError(f"--url names a running server. Leave out what is for one to start: {', '.join(given)}.")


def planned(
    flags: Mapping[str, Any], profile: Path | None = None, *, stock: bool = False, own: Sequence[str] = ()
) -> "Planned":
    """Return an engine with these options of ``thor-spec serve``, to be started when it is visited.

    Args:
        own: arguments for vLLM, behind those among ``flags``, that the command sets: nobody is warned of these.
    """
    from thor_spec.cli.progress import progress
    from thor_spec.gates.judging import Planned
    from thor_spec.nano import shipped
    from thor_spec.profiles import catalogue
    from thor_spec.serve.plan import make_plan

    given = {"port": free_port(), **flags, "vllm_args": (*(flags.get("vllm_args") or ()), *own)}
    named = catalogue.layered([str(profile)] if profile else ())
    resolved = resolve(given, named, {"model": shipped.default_model(DEFAULT_MODEL)})
    plan = make_plan(resolved, note=note, stock=stock, own=len(own))
    return Planned(plan, lambda: progress(lambda ready: note(f"ready: {ready.url}")))


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
