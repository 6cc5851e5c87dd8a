"""Engines that nobody supervises: a free lock does not prove that the device is empty.

vLLM gives its workers titles such as "VLLM::EngineCore". They survive a killed API server that ran outside any job,
and hold its memory. They are reported, never signalled: a title proves nothing about whose job it was.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

from thor_spec.errors import OrphanError
from thor_spec.guard import cgroup, processes, shim
from thor_spec.guard.locks import RESIDENCY

TITLE_PREFIX = "VLLM::"


@dataclass(frozen=True, slots=True)
class Orphan:
    """An engine process of this user outside every job."""

    pid: int
    title: str


def find() -> tuple[Orphan, ...]:
    """Return this user's engine processes outside every job, what is left of jobs that lost their shim, and shims
    whose lock excludes nobody any more.

    Processes of other users are not ours to judge.
    """
    table = {process.pid: process for process in processes.snapshot() if process.is_live}
    shims = {pid for pid in table if shim.__name__ in processes.arguments(pid)[:4]}
    found = [Orphan(pid, "a job whose lock file was deleted") for pid in shims if _is_ours(pid) and _lost_its_lock(pid)]
    for pid, process in table.items():
        arguments = processes.arguments(pid)
        title = arguments[0] if arguments else process.name
        if title.startswith(TITLE_PREFIX) and _is_ours(pid) and not _descends(pid, shims, table):
            found.append(Orphan(pid, title))
    known = {orphan.pid for orphan in found}
    for pid in (pid for path in cgroup.leaves() for pid in cgroup.pids(path)):
        if pid in table and pid not in known and _is_ours(pid) and not _descends(pid, shims, table):
            found.append(Orphan(pid, f"{table[pid].name}, of a job that lost its shim"))
    return tuple(found)


def refuse(found: Iterable[Orphan]) -> None:
    """Raise OrphanError, naming each, unless there is none."""
    if named := ", ".join(f"pid {orphan.pid} ({orphan.title})" for orphan in found):
        raise OrphanError(
            f"An engine without a supervisor is alive: {named}. It holds memory that the new job needs. "
            "Make sure that nobody uses it, end it with `kill`, and start again."
        )


def _is_ours(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


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
