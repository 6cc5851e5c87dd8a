"""The mark that every process of a job carries in its environment, so that what is left of it can be told from others.

A title or a command line proves nothing: anybody may look like an engine. The environment at exec is inherited by every
process of a job, whatever session or parent it has later, and by nobody else. It names the job and the lock directory,
since a job under other locks is none of our business.

Source: proc_pid_environ(5): readable by the process's own user and by root.
"""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from thor_spec import env
from thor_spec.guard import processes, shim
from thor_spec.guard.processes import Process

_INVOCATION_VARIABLE = "INVOCATION_ID"


class Marked(NamedTuple):
    """A live process that carries the mark of a job."""

    process: Process
    job: str
    invocation: str | None  # systemd's id of the unit's run, if a unit started the job


def environment(job: str, locks: Path) -> dict[str, str]:
    """Return the variables that mark a process as part of this job."""
    # setproctitle, which vLLM's workers use, writes the title over the environment in /proc, unless told not to.
    mark = {env.JOB_VARIABLE: job, env.LOCKS_VARIABLE: str(locks), "SPT_NOENV": "1"}
    invocation = env.invocation_id()
    return {**mark, _INVOCATION_VARIABLE: invocation} if invocation else mark


def find(locks: Path | None) -> Iterator[Marked]:
    """Yield the live processes of jobs under these locks (None: any), without this process and those above it."""
    table = {process.pid: process for process in processes.snapshot() if process.is_live}
    above = set()
    pid = os.getpid()
    while pid in table and pid not in above:
        above.add(pid)
        pid = table[pid].ppid
    for process in table.values():
        if process.pid not in above and (found := _read(process, locks)):
            yield found


def carries(process: Process, job: str) -> bool:
    """Return whether this very process carries the mark of this job."""
    return _variables(process).get(env.JOB_VARIABLE) == job and processes.is_same(process)


def job_of(process: Process) -> str:
    """Return the uuid in the mark of a process, empty without one."""
    return _variables(process).get(env.JOB_VARIABLE, "")


def is_shim(process: Process) -> bool:
    """Return whether a marked process is the job's shim, which passes a request to stop on to all others."""
    return shim.__name__ in processes.arguments(process.pid)[:4]


def title_of(process: Process) -> str:
    """Return the title or command line of a process, short and safe to print."""
    line = " ".join(processes.arguments(process.pid))[:60] or process.name
    return "".join(c if c.isprintable() else "?" for c in line)


def _read(process: Process, locks: Path | None) -> Marked | None:
    variables = _variables(process)
    job = variables.get(env.JOB_VARIABLE, "")
    # What was read belongs to this process only if the pid still does.
    elsewhere = locks is not None and variables.get(env.LOCKS_VARIABLE) != str(locks)
    if not is_uuid(job) or elsewhere or not processes.is_same(process):
        return None
    return Marked(process, job, variables.get(_INVOCATION_VARIABLE))


def _variables(process: Process) -> dict[str, str]:
    """Return the environment of a process that is marked; empty for all others."""
    try:
        with open(f"/proc/{process.pid}/environ", "rb") as file:
            content = file.read()
    except OSError:
        return {}  # another user's, or gone
    if f"{env.JOB_VARIABLE}=".encode() not in content:
        return {}
    return dict(part.partition("=")[::2] for part in content.decode(errors="replace").split("\0"))


def is_uuid(text: str) -> bool:
    """Return whether this is a job's uuid as we write it."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
