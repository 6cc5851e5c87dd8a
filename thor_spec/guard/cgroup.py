"""Control groups, version 2: one of the job's own where this user may make one, and that of a container.

Killing a group misses nobody, not even a fork under way. An addition, never a condition: without it the job's processes
are found by descent. Light to import, because the job shim starts with it.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cgroup.kill needs Linux 5.14); cgroups(7).
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress

PREFIX = "thor-spec-job-"  # and the job's uuid
CONTROL_LEAF, JOB_LEAF = "ctl", "job"  # what a systemd unit delegates: the launcher's group, and the jobs' beside it
ENTERED_S = 60.0
"""A younger group may belong to a job of other locks that has yet to enter it; the kernel would let it be removed."""
_KILL = "cgroup.kill"
_PROCS = "cgroup.procs"
_LEAST_ID = 12  # characters of a container's id that name it and nothing else


def mount_point() -> str | None:
    """Return where the unified hierarchy is mounted; None without one."""
    return parse_mount_point(_text("/proc/self/mountinfo"))


def parse_mount_point(mountinfo: str) -> str | None:
    """Return where the unified hierarchy is mounted, from the text of ``/proc/self/mountinfo``; None without one."""
    for line in mountinfo.splitlines():
        front, separator, back = line.partition(" - ")
        if separator and back.split()[0] == "cgroup2":
            return front.split()[4]
    return None


def of_process(pid: int | str = "self") -> str | None:
    """Return the directory of a process's group; None when it ended, or where there is no unified hierarchy."""
    mounted = mount_point()
    below = [line[3:] for line in _text(f"/proc/{pid}/cgroup").splitlines() if line.startswith("0::")]
    return mounted + below[0].rstrip("/") if mounted and below else None


def of_container(pid: int, container_id: str) -> str | None:
    """Return the group of a container's process; None where its path does not carry the container's own id.

    A wrong path would end somebody else. Keep it from the start on: it cannot be asked for once the process is gone.
    """
    path = of_process(pid) or ""
    # docker-<id>.scope, docker/<id>, libpod-<id>.scope/container: up to the part that names the container.
    end = path.find("/", path.find(container_id))
    if len(container_id) < _LEAST_ID or container_id not in path or ".." in path.split("/"):
        return None
    return path if end < 0 else path[:end]


def create(uuid: str) -> str | None:
    """Make the job's group and return its directory, or None where that is not allowed or not offered.

    It lies below ours, or below ``job/`` beside it where a systemd unit put us into ``ctl/``.
    """
    if (parent := of_process()) is None:
        return None
    unit, _, leaf = parent.rpartition("/")
    try:
        if leaf == CONTROL_LEAF:
            parent = f"{unit}/{JOB_LEAF}"
            with suppress(FileExistsError):
                os.mkdir(parent)
        for name in os.listdir(parent):
            if name.startswith(PREFIX) and _age_s(f"{parent}/{name}") > ENTERED_S:
                remove(f"{parent}/{name}")  # left by a launcher that was killed; the kernel refuses one in use
        path = f"{parent}/{PREFIX}{uuid}"
        os.mkdir(path)
    except OSError:
        return None
    if not (may_kill(path) and os.access(f"{path}/{_PROCS}", os.W_OK)):
        remove(path)
        return None
    return path


def enter(path: str) -> bool:
    """Move this process into the group; what it starts from now on is born there. Return whether it worked."""
    return _write(f"{path}/{_PROCS}", b"0")


def may_kill(path: str) -> bool:
    """Return whether ``kill`` is offered and permitted."""
    return os.access(f"{path}/{_KILL}", os.W_OK)


def kill(path: str) -> bool:
    """Send SIGKILL to every process in the group and below, at once; return whether the kernel took the order."""
    return _write(f"{path}/{_KILL}", b"1")


def pids(path: str) -> tuple[int, ...]:
    """Return the processes in the group and below; zombies are not listed."""
    found: set[int] = set()
    for folder, _, _ in os.walk(path):
        found.update(map(int, _text(f"{folder}/{_PROCS}").split()))
    return tuple(sorted(found - {0}))  # 0: outside our pid namespace


def is_populated(path: str) -> bool:
    """Return whether a process, be it a zombie, is in the group or below; a group that was removed has none."""
    return "populated 1" in _text(f"{path}/cgroup.events")


def leaves() -> Iterator[str]:
    """Yield the groups of all jobs of this boot, wherever in the hierarchy their launchers were."""
    if root := mount_point():
        yield from job_groups(root)


def job_groups(root: str) -> Iterator[str]:
    """Yield the groups of jobs below a directory."""
    for path, names, _ in os.walk(root):
        yield from (f"{path}/{name}" for name in names if name.startswith(PREFIX))


def job_of(path: str) -> str:
    """Return the uuid in the name of a job's group."""
    return path.rpartition("/")[2].removeprefix(PREFIX)


def _age_s(path: str) -> float:
    try:
        return time.time() - os.stat(path).st_ctime
    except OSError:  # another was faster
        return 0.0


def remove(path: str) -> None:
    """Remove the group if it is empty."""
    with suppress(OSError):
        os.rmdir(path)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, value: bytes) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, value)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
