"""The watchdog as its supervisor sees it: started beside the job, listened to, started again once if it is lost."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thor_spec.errors import GuardFailureError
from thor_spec.guard import memory, processes, watchdog
from thor_spec.guard.containers import ContainerJob
from thor_spec.guard.job import Job
from thor_spec.guard.triggers import Trigger

HEARTBEAT_S = 2.0
FIRST_BEAT_S = 15.0  # an interpreter starts late on a machine that loads weights
PAUSE_S = 1.0  # we did not look for so long: judge nobody by it
RESPAWNS = 1
END_WAIT_S = 2.0
KERNEL_LOG = Path("/dev/kmsg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What the watchdog reads. Tests put files of their own here."""

    meminfo: Path = memory.MEMINFO
    pressure: Path = memory.PRESSURE
    kernel_log: Path = KERNEL_LOG


class Watchdog:
    """One watchdog process at a time; ``check`` is called several times a second."""

    def __init__(
        self,
        job: Job | ContainerJob,
        *,
        floor_bytes: int,
        state_dir: Path,
        sources: Sources | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.floor_bytes = floor_bytes
        self.available_bytes: int | None = None
        self.least_available_bytes: int | None = None
        self.trigger: Trigger | None = None
        self.respawns = 0
        self._job = job
        self._state_dir = state_dir
        self._sources = sources or Sources()
        self._clock = clock
        self._notices: list[str] = []
        self._told: set[str] = set()
        # Shared with every watchdog of this job, so that a second one reads on where the first one ended.
        self._kernel_log = _open_at_end(self._sources.kernel_log)
        self._process, self._socket = self._spawn()
        self._started = self._heard = self._checked = clock()
        self._beaten = False

    @property
    def pid(self) -> int:
        """Pid of the present watchdog."""
        return self._process.pid

    @property
    def beats(self) -> bool:
        """Whether the present watchdog has made its first poll."""
        return self._beaten

    def check(self) -> None:
        """Hear the watchdog; start it again if it was lost.

        Raises: GuardFailureError, when it is lost a second time: nothing watches the job any more.
        """
        now = self._clock()
        self._hear(now)
        if now - self._checked > PAUSE_S:
            self._heard = self._started = now
        self._checked = now
        limit_s = HEARTBEAT_S if self._beaten else FIRST_BEAT_S
        ended = self._process.poll() is not None
        if not ended and now - self._heard <= limit_s:
            return
        how = f"ended (status {self._process.returncode})" if ended else f"has been silent for {limit_s:g} s"
        self._end()
        if self.respawns >= RESPAWNS:
            raise GuardFailureError(
                f"The memory watchdog {how} a second time, so nothing protects the board; the job is stopped. "
                "See `dmesg` for why it dies, then start again."
            )
        self.respawns += 1
        self._note(f"the memory watchdog {how}; a new one was started")
        self._process, self._socket = self._spawn()
        self._started = self._heard = now
        self._beaten = False

    def notices(self) -> list[str]:
        """Return what a person should know, each line once."""
        fresh, self._notices = self._notices, []
        return fresh

    def phase(self, name: str) -> None:
        """Tell the watchdog what it would write into the stop record."""
        self._send(phase=name)

    def close(self) -> None:
        """End the watchdog; the job must have ended, or somebody else must watch it."""
        self._hear(self._clock())
        self._send(bye=True)
        self._end()
        if self._kernel_log is not None:
            os.close(self._kernel_log)
            self._kernel_log = None

    def _end(self) -> None:
        """Give the process a moment to obey, then kill it."""
        if self._process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_WAIT_S if self._clock() - self._heard <= HEARTBEAT_S else 0)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._hear(self._heard)  # a trigger may have been its last word
        self._socket.close()

    def _hear(self, now: float) -> None:
        while True:
            try:
                packet = self._socket.recv(65536)
            except OSError:
                return
            if not packet:
                return
            said: dict[str, Any] = json.loads(packet)
            self._heard = now
            if (available := said.get("available")) is not None:
                self._beaten = True
                self.available_bytes = available
                least = self.least_available_bytes
                self.least_available_bytes = available if least is None else min(least, available)
            for line in said.get("notices", ()):
                self._note(line)
            if warning := said.get("warning"):
                self._notices.append(warning)
            if fields := said.get("trigger"):
                self.trigger = self.trigger or Trigger(**fields)

    def _note(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._notices.append(line)

    def _send(self, **what: Any) -> None:
        with suppress(OSError):
            self._socket.send(json.dumps(what).encode())

    def _spawn(self) -> tuple["subprocess.Popen[bytes]", socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        job, me = self._job, processes.read(os.getpid())
        assert me is not None
        described = {
            "uuid": job.identity.uuid,
            "title": job.identity.title,
            "phase": job.identity.phase,
            "pid": job.identity.pid,
            "log_file": job.identity.log_file,
        }
        options = {
            "--socket": theirs.fileno(),
            "--root": job.members.root.pid,
            "--root-ticks": job.members.root.start_ticks,
            "--root-is": watchdog.SHIM if job.members.has_shim else watchdog.CONTAINER,
            "--supervisor": me.pid,
            "--supervisor-ticks": me.start_ticks,
            "--grace": job.grace_s,
            "--floor": self.floor_bytes,
            "--meminfo": self._sources.meminfo,
            "--pressure": self._sources.pressure,
            "--state": self._state_dir,
            "--job": json.dumps(described),
        }
        if job.members.cgroup:
            options["--cgroup"] = job.members.cgroup
        passed = [theirs.fileno()]
        if self._kernel_log is not None:
            options["--kernel-log"] = self._kernel_log
            passed.append(self._kernel_log)
        flat = [str(part) for pair in options.items() for part in pair]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", watchdog.__name__, *flat],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=passed,
                start_new_session=True,  # a terminal's signals are for the supervisor
            )
        finally:
            theirs.close()
        return process, ours


def _open_at_end(path: Path) -> int | None:
    """Open the kernel log behind its last record, or return None where that is not permitted."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    os.lseek(fd, 0, os.SEEK_END)
    return fd
