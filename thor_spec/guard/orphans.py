"""Engines that nobody supervises: a free lock does not prove that the device is empty.

vLLM gives its workers titles such as "VLLM::EngineCore". They survive a killed API server that ran outside any job,
and hold its memory. They are reported, never signalled: a title proves nothing about whose job it was. What carries the
mark or the label of a job is reported as well, and `thor-spec reap` may end it.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from thor_spec.errors import OrphanError, PlatformError
from thor_spec.guard import cgroup, marker, processes, shim
from thor_spec.guard.container_runtime import CallFailedError, Container, ContainerRuntime
from thor_spec.guard.locks import RESIDENCY

TITLE_PREFIX = "VLLM::"


@dataclass(frozen=True, slots=True)
class Orphan:
    """An engine process outside every job, or (``pid`` 0) a container of a job that nobody runs."""

    pid: int
    title: str

    def describe(self) -> str:
        """Return what it is, in a few words."""
        return f"pid {self.pid} ({self.title})" if self.pid else self.title


def find(locks: Path | None = None, *, everyone: bool = False) -> tuple[Orphan, ...]:
    """Return engine processes outside every job, shims whose lock excludes nobody any more, and labelled containers.

    Args:
        locks: the lock directory, with no job under it: whatever carries the mark of one is left over then.
        everyone: look at all users' processes; those of others are not ours to judge, unless we are the administrator.

    Raises: ContainerRuntimeError, if there is a container runtime and it hangs.
    """
    table = {process.pid: process for process in processes.snapshot() if process.is_live}
    judged = {pid for pid in table if everyone or processes.owner(pid) == os.getuid()}
    shims = {pid for pid in table if shim.__name__ in processes.arguments(pid)[:4]}
    found = {pid: Orphan(pid, "a job whose lock file was deleted") for pid in shims & judged if _lost_its_lock(pid)}
    for pid in judged:
        arguments = processes.arguments(pid)
        title = arguments[0] if arguments else table[pid].name
        if title.startswith(TITLE_PREFIX) and not _descends(pid, shims, table):
            found[pid] = Orphan(pid, title)
    for marked in marker.find(locks) if locks else ():
        pid = marked.process.pid
        title = marker.title_of(marked.process)
        found.setdefault(pid, Orphan(pid, f"{title}, left over from job {marked.job}"))
    for pid in (pid for path in cgroup.leaves() for pid in cgroup.pids(path)):
        if pid in judged and not _descends(pid, shims, table):
            found.setdefault(pid, Orphan(pid, f"{table[pid].name}, of a job that lost its shim"))
    return (*found.values(), *of_containers(_containers()))


def of_containers(containers: Iterable[Container]) -> tuple[Orphan, ...]:
    """Return what refuses a start: a labelled container in any state, since one that never ran can hold the device."""
    boot = processes.boot_id()
    return tuple(
        Orphan(0, container.describe() + ("" if container.boot == boot else ", from an earlier boot"))
        for container in containers
    )


def refuse(found: Iterable[Orphan]) -> None:
    """Raise OrphanError, naming each, unless there is none."""
    if named := ", ".join(orphan.describe() for orphan in found):
        raise OrphanError(
            f"An engine without a supervisor is alive or was left behind: {named}. It may hold memory that the new job "
            "needs. Make sure that nobody uses it, end it with `thor-spec reap --yes` or `kill`, and start again."
        )


def _containers() -> tuple[Container, ...]:
    try:
        return ContainerRuntime.find().containers()
    except (PlatformError, CallFailedError):
        return ()  # no runtime, no daemon, or no permission to use it: no containers of ours


def _lost_its_lock(shim_pid: int) -> bool:
    """Return whether a shim holds a deleted file: a new one in its place is free, and the job still lives."""
    links = f"/proc/{shim_pid}/fd"
    try:
        return any(os.readlink(f"{links}/{fd}").endswith(f"/{RESIDENCY} (deleted)") for fd in os.listdir(links))
    except OSError:
        return False


def _descends(pid: int, roots: set[int], table: dict[int, processes.Process]) -> bool:
    seen: set[int] = set()
    while pid in table and pid not in seen:
        seen.add(pid)  # the table is not one instant; a reused pid could close a ring
        pid = table[pid].ppid
        if pid in roots:
            return True
    return False
