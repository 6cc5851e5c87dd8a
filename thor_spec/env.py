"""The only reader of the environment: where files live, and what a child inherits.

Behaviour never hangs on a variable of ours; it lives in the configuration. What is read here are paths, the terminal,
and switches that belong to other projects.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

# Set by the launcher for the engine it starts: the directory where each engine process leaves its receipt.
RECEIPTS_VARIABLE = "THOR_SPEC_RECEIPTS"
# Set for every process of a job: its uuid, and the lock directory under which it runs.
JOB_VARIABLE = "THOR_SPEC_JOB"
LOCKS_VARIABLE = "THOR_SPEC_LOCKS"


def runtime_dir() -> Path:
    """Return the per-user directory for locks, identity records and sockets; it need not exist yet.

    ``$THOR_SPEC_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/thor-spec``, else ``thor-spec-<uid>`` in the temporary
    directory, in that order. The system-wide directory, where an administrator made one, is the guard's business.
    """
    if named := os.environ.get("THOR_SPEC_RUNTIME_DIR"):
        return Path(named)
    if session := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(session) / "thor-spec"
    return Path(tempfile.gettempdir()) / f"thor-spec-{os.getuid()}"


def state_dir() -> Path:
    """Return the directory for what outlives a job: its last record and dumps; it need not exist yet.

    ``$THOR_SPEC_STATE_DIR``, else ``$XDG_STATE_HOME/thor-spec``, else ``~/.local/state/thor-spec``.
    """
    if named := os.environ.get("THOR_SPEC_STATE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "thor-spec"


def config_dir() -> Path:
    """Return the directory of the user's own settings; it need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "thor-spec"


def cache_dir() -> Path:
    """Return the directory for files that can be made again; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "thor-spec"


def triton_cache_dir() -> Path:
    """Return the directory of compiled and tuned kernels, which all engines share; the caller may have named it."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or cache_dir() / "triton")


def receipts_dir() -> Path | None:
    """Return where this engine process must leave its receipt, or None when no launcher waits for one."""
    named = os.environ.get(RECEIPTS_VARIABLE)
    return Path(named) if named else None


def triton_interprets() -> bool:
    """Return whether Triton kernels run under its interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def python_path() -> str:
    """Return ``PYTHONPATH``, empty if unset."""
    return os.environ.get("PYTHONPATH", "")


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with ``changes`` applied, for a child."""
    return {**os.environ, **changes}


def tool_environment() -> dict[str, str]:
    """Return the environment for a tool that serves us but is no part of a job, such as the docker CLI."""
    return {name: value for name, value in os.environ.items() if name not in (JOB_VARIABLE, LOCKS_VARIABLE)}


def engine_variable(name: str) -> str | None:
    """Return a variable that belongs to vLLM or Triton and that an engine started from here would see."""
    return os.environ.get(name) or None


def invocation_id() -> str | None:
    """Return systemd's id of this run of the unit, shared by all its processes; None outside a unit."""
    return os.environ.get("INVOCATION_ID") or None


def notify_socket() -> str | None:
    """Return the address of the service manager's socket: a path, or ``@`` and an abstract name; None without one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    return address if address[:1] in ("/", "@") and len(address) > 1 else None


def watchdog() -> tuple[int | None, int | None]:
    """Return the service manager's watchdog interval in microseconds and the pid it is meant for; None if not said."""
    usec, pid = (os.environ.get(name, "") for name in ("WATCHDOG_USEC", "WATCHDOG_PID"))
    return int(usec) if usec.isdecimal() else None, int(pid) if pid.isdecimal() else None
