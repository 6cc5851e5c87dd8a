"""The processes of one job: below its shim, in its session, in its cgroup, or seen there before.

The launcher and the watchdog both keep such a list, because either may have to end the job alone.
"""

import signal
from contextlib import suppress

from thor_spec.guard import cgroup, processes
from thor_spec.guard.processes import Process

KILL_ROUNDS = 64  # a fork bomb outruns any number; the cgroup is what ends it


class Members:
    """Live processes of the job, without the shim; each ``census`` is a fresh look."""

    def __init__(self, shim: Process, cgroup_path: str | None = None) -> None:
        self.shim = shim
        self.cgroup = cgroup_path
        self._known: dict[int, Process] = {}

    def census(self) -> list[Process]:
        """Return the processes of the job that live now."""
        table = {process.pid: process for process in processes.snapshot()}
        shim = table.get(self.shim.pid)
        found: dict[int, Process] = {}
        if shim is None or shim.start_ticks == self.shim.start_ticks:
            # Once the shim is gone, the chain of parents is cut; the session is what remains, and its number stays
            # taken while anybody is in it. A new process of that number would head a session of its own.
            found = {p.pid: p for p in table.values() if p.sid == self.shim.pid and p.pid != self.shim.pid}
        if shim is not None and shim.start_ticks == self.shim.start_ticks:
            found |= _below(self.shim.pid, table)
        if self.cgroup is not None:
            found |= {pid: table[pid] for pid in cgroup.pids(self.cgroup) if pid in table}
        for pid, process in self._known.items():
            if (now := table.get(pid)) and now.start_ticks == process.start_ticks:
                found[pid] = now
        found.pop(self.shim.pid, None)
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


def _below(root: int, table: dict[int, Process]) -> dict[int, Process]:
    children: dict[int, list[Process]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process)
    found: dict[int, Process] = {}
    queue = [root]
    while queue:
        for process in children.pop(queue.pop(), []):
            found[process.pid] = process
            queue.append(process.pid)
    return found
