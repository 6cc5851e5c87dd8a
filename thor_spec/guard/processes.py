"""Processes as /proc shows them: who descends from whom, and signals that cannot hit a reused pid.

Light to import, because the job shim starts with it. Source: proc_pid_stat(5), pidfd_open(2), pidfd_send_signal(2).
"""

import os
import signal
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Process(NamedTuple):
    """One line of ``/proc/PID/stat``. A pid is reused; a pid with its start time is not."""

    pid: int
    ppid: int
    sid: int
    state: str
    start_ticks: int  # since boot, in clock ticks
    name: str  # cut by the kernel at 15 bytes

    @property
    def is_live(self) -> bool:
        """Whether it can still run code; a zombie holds neither memory nor files."""
        return self.state not in "ZXx"


NOBODY = Process(0, 0, 0, "X", 0, "")
"""Stands for a process that cannot be seen: it never lives, and is never signalled."""


def parse(stat: str) -> Process:
    """Return the process that the text of ``/proc/PID/stat`` describes."""
    # The name may hold blanks and parentheses; nothing behind it does.
    head, _, tail = stat.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()
    return Process(int(pid), int(fields[1]), int(fields[3]), fields[0], int(fields[19]), name)


def read(pid: int) -> Process | None:
    """Return the process with this pid, or None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return parse(file.read())
    except OSError:
        return None


def snapshot() -> Iterator[Process]:
    """Yield every visible process. Not atomic: one that is born or adopted meanwhile may be missed."""
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (process := read(int(entry))):
            yield process


def descendants(root: int) -> list[Process]:
    """Return all processes whose chain of parents reaches ``root``, without it, zombies included."""
    return below(root, snapshot())


def below(root: int, table: Iterable[Process]) -> list[Process]:
    """Return those of a table whose chain of parents reaches ``root``, without it."""
    children: dict[int, list[Process]] = {}
    for process in table:
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        born = children.pop(queue.pop(), [])
        found += born
        queue += [process.pid for process in born]
    return found


def owner(pid: int) -> int | None:
    """Return the user who runs a process, or None when it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def pid_inside(pid: int) -> int:
    """Return the pid by which a process knows itself, be it in a container; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return next((int(line.split()[-1]) for line in file if line.startswith("NSpid:")), pid)
    except OSError:
        return 0


def is_same(process: Process) -> bool:
    """Return whether this very process still lives."""
    now = read(process.pid)
    return now is not None and now.is_live and now.start_ticks == process.start_ticks


def send(process: Process, signum: int) -> bool:
    """Signal this very process; return False when it is gone or its pid belongs to another one by now.

    Raises: PermissionError, if it belongs to somebody else.
    """
    if process.pid <= 0:  # no process, and to some calls a whole group
        return False
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor pins the process, so a check made after opening it stays true.
        if not is_same(process):
            return False
        signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def arguments(pid: int) -> list[str]:
    """Return the arguments, or the title that the process gave itself; empty for a kernel thread or a zombie."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            line = file.read()
    except OSError:
        return []
    return [part.decode(errors="replace") for part in line.rstrip(b"\0").split(b"\0")] if line else []


def kernel_stack(pid: int) -> str:
    """Return where a process waits inside the kernel: its stack where that may be read, else the function's name."""
    for name in ("stack", "wchan"):
        try:
            with open(f"/proc/{pid}/{name}", encoding="ascii", errors="replace") as file:
                if (text := file.read().strip()) not in ("", "0"):
                    return text.replace("[<0>] ", "")
        except OSError:
            continue
    return "unknown"


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
