"""The processes of one job: below its root, in its session, in its control group, or seen there before.

The launcher and the watchdog both keep such a list, because either may have to end the job alone.
"""

import os
import signal
from contextlib import suppress

from thor_spec.guard import cgroup, processes
from thor_spec.guard.processes import Process

KILL_ROUNDS = 64  # a fork bomb outruns any number; the control group is what ends it


class Members:
    """Live processes of the job; each ``census`` is a fresh look.

    The root is the job's shim, which is not one of them, since it holds the lock until all others are gone; or the
    first process of a container (``has_shim`` False), which is one; or ``NOBODY``, where that cannot be seen.
    """

    def __init__(self, root: Process, cgroup_path: str | None = None, *, has_shim: bool = True) -> None:
        self.root = root
        self.cgroup = cgroup_path
        self.has_shim = has_shim
        self._known: dict[int, Process] = {}

    def census(self) -> list[Process]:
        """Return the processes of the job that live now."""
        table = {process.pid: process for process in processes.snapshot()}
        root = table.get(self.root.pid)
        found: dict[int, Process] = {}
        if self.root.pid and (root is None or root.start_ticks == self.root.start_ticks):
            # Once the root is gone, the chain of parents is cut; the session is what remains, and its number stays
            # taken while anybody is in it. A new process of that number would head a session of its own.
            found = {p.pid: p for p in table.values() if p.sid == self.root.pid}
        if root is not None and root.start_ticks == self.root.start_ticks:
            found |= {p.pid: p for p in (root, *processes.below(root.pid, table.values()))}
        if self.cgroup is not None:
            found |= {pid: table[pid] for pid in cgroup.pids(self.cgroup) if pid in table}
        for pid, process in self._known.items():
            if (now := table.get(pid)) and now.start_ticks == process.start_ticks:
                found[pid] = now
        if self.has_shim:
            found.pop(self.root.pid, None)
        self._known = {pid: process for pid, process in found.items() if process.is_live}
        return list(self._known.values())

    def kill(self) -> list[Process]:
        """Send SIGKILL to all of them, again while new ones appear; return who was still listed at the last look."""
        if self.cgroup is not None:
            cgroup.kill(self.cgroup)
        signalled: set[tuple[int, int]] = set()
        for _ in range(KILL_ROUNDS):
            found = self.census()
            fresh = [process for process in found if (process.pid, process.start_ticks) not in signalled]
            if not fresh:
                break
            for process in fresh:
                signalled.add((process.pid, process.start_ticks))
                with suppress(PermissionError):  # a set-user-ID program: it is waited for
                    processes.send(process, signal.SIGKILL)
        return found

    def may_be_killed(self) -> bool:
        """Return whether ``kill`` can work here: a container's processes may belong to another user."""
        if os.geteuid() == 0 or (self.cgroup is not None and cgroup.may_kill(self.cgroup)):
            return True
        return processes.owner(self.root.pid) == os.geteuid()
