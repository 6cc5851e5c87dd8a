"""The control group of one container: who is in it, and how to end it when the container runtime does not answer.

Taken only where the path names the container's own id: a wrong path would end somebody else.

Source: cgroups(7), Linux Documentation/admin-guide/cgroup-v2.rst (cgroup.kill needs Linux 5.14).
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ContainerCgroup:
    """One control group, version 2. Keep it from the start on: the path cannot be asked for once processes are gone."""

    path: Path

    @property
    def is_populated(self) -> bool:
        """Whether a process, be it a zombie, is in it or below it."""
        try:
            return "populated 1" in (self.path / "cgroup.events").read_text(encoding="ascii")
        except OSError:
            return False  # the runtime removes an empty group

    def pids(self) -> tuple[int, ...]:
        """Return the processes in it and below it."""
        found: set[int] = set()
        for file in [self.path / "cgroup.procs", *self.path.glob("**/cgroup.procs")]:
            try:
                found.update(map(int, file.read_text(encoding="ascii").split()))
            except OSError:
                continue
        return tuple(sorted(found))

    def kill(self) -> bool:
        """Kill all of it at once; return False where that is not permitted or not offered."""
        try:
            (self.path / "cgroup.kill").write_text("1", encoding="ascii")
        except OSError:
            return False
        return True


def of_container(pid: int, container_id: str) -> ContainerCgroup | None:
    """Return the control group of a container's process; None where it does not carry the container's id."""
    mount = mount_point()
    parts = [part for part in path_of(pid).split("/") if part]
    # docker-<id>.scope, docker/<id>, libpod-<id>.scope/container: up to the part that names the container.
    index = next((i for i, part in enumerate(parts) if container_id in part), None)
    if mount is None or index is None or len(container_id) < 12 or ".." in parts:
        return None
    return ContainerCgroup(mount.joinpath(*parts[: index + 1]))


def mount_point() -> Path | None:
    """Return where cgroup v2 is mounted; None where it is not."""
    for line in _text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return Path(before.split()[4])
    return None


def path_of(pid: int) -> str:
    """Return the path of a process's control group below the mount point; empty when it ended, or without cgroup v2."""
    return next((line[3:] for line in _text(f"/proc/{pid}/cgroup").splitlines() if line.startswith("0::")), "")


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
