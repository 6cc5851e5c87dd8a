"""A cgroup of the job's own, where this user may make one: killing it misses nobody, not even a fork under way.

An addition, never a condition: without it the job's processes are found by descent. Light to import, because the job
shim starts with it. Source: Linux, Documentation/admin-guide/cgroup-v2.rst.
"""

import os
from collections.abc import Iterator
from contextlib import suppress

PREFIX = "thor-spec-job-"
_KILL = "cgroup.kill"  # Linux 5.14
_PROCS = "cgroup.procs"


def mount_point(mountinfo: str) -> str | None:
    """Return where the unified hierarchy is mounted, from the text of ``/proc/self/mountinfo``; None without one."""
    for line in mountinfo.splitlines():
        front, separator, back = line.partition(" - ")
        if separator and back.split()[0] == "cgroup2":
            return front.split()[4]
    return None


def own() -> str | None:
    """Return the directory of the cgroup that this process is in, or None where there is no unified hierarchy."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            mounted = mount_point(file.read())
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            below = [line[3:].strip() for line in file if line.startswith("0::")]
    except OSError:
        return None
    return mounted + below[0].rstrip("/") if mounted and below else None


def create(uuid: str) -> str | None:
    """Make the job's cgroup below ours and return its directory, or None where that is not allowed or not offered."""
    if (parent := own()) is None:
        return None
    path = f"{parent}/{PREFIX}{uuid}"
    try:
        for name in os.listdir(parent):
            if name.startswith(PREFIX):
                remove(f"{parent}/{name}")  # left by a launcher that was killed; the kernel refuses one in use
        os.mkdir(path)
    except OSError:
        return None
    if not (os.access(f"{path}/{_KILL}", os.W_OK) and os.access(f"{path}/{_PROCS}", os.W_OK)):
        remove(path)
        return None
    return path


def enter(path: str) -> bool:
    """Move this process into the cgroup; what it starts from now on is born there. Return whether it worked."""
    return _write(f"{path}/{_PROCS}", b"0")


def kill(path: str) -> bool:
    """Send SIGKILL to every process in the cgroup and below, at once; return whether the kernel took the order."""
    return _write(f"{path}/{_KILL}", b"1")


def pids(path: str) -> tuple[int, ...]:
    """Return the processes in the cgroup; zombies are not listed."""
    try:
        with open(f"{path}/{_PROCS}", encoding="ascii") as file:
            return tuple(int(line) for line in file if line.strip() != "0")  # 0: outside our pid namespace
    except OSError:
        return ()


def leaves() -> Iterator[str]:
    """Yield the cgroups of all jobs of this boot, wherever in the hierarchy their launchers were."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            root = mount_point(file.read())
    except OSError:
        return
    for path, names, _ in os.walk(root) if root else ():
        yield from (f"{path}/{name}" for name in names if name.startswith(PREFIX))


def remove(path: str) -> None:
    """Remove the cgroup if it is empty."""
    with suppress(OSError):
        os.rmdir(path)


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
