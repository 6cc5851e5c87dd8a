"""One job, seen by its launcher: take both locks, start the shim, stop everything.

The launcher keeps admission; residency goes to the shim, and with it the duty to leave nothing behind.
"""

import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self

from thor_spec.env import child_environment
from thor_spec.errors import StuckInKernelError
from thor_spec.guard import cgroup, identity, marker, orphans, processes, shim
from thor_spec.guard.identity import Identity
from thor_spec.guard.locks import ADMISSION, RESIDENCY, Lock, LockDirectory
from thor_spec.guard.members import Members

GRACE_S = 25.0
KILL_WAIT_S = 60.0
POLL_TICK_S = 0.02
CENSUS_TICK_S = 1.0


class Job:
    """A started job. Leaving its ``with`` block stops it and releases admission."""

    def __init__(
        self,
        shim_process: subprocess.Popen[bytes],
        record: Identity,
        *,
        admission: Lock,
        owns_admission: bool,
        grace_s: float,
        cgroup_path: str | None = None,
    ) -> None:
        self.identity = record
        self.grace_s = grace_s
        self._shim = shim_process
        self._admission = admission
        self._owns_admission = owns_admission
        # Our own child, unreaped: whatever its pid shows now is the shim.
        process = processes.read(shim_process.pid)
        self.members = Members(process or processes.NOBODY, cgroup_path)
        self._exit_status: int | None = None
        self._census_at = 0.0

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        output: Path | int | None = None,
        locks: LockDirectory | None = None,
        admission: Lock | None = None,
        title: str = "",
        unit: str | None = None,
        url: str | None = None,
        grace_s: float = GRACE_S,
        wait: bool = False,
        give_up: Callable[[], bool] = lambda: False,
        report: Callable[[Identity | None], None] | None = None,
        find_orphans: Callable[[], Iterable[orphans.Orphan]] | None = None,
        preflight: Callable[[], None] = lambda: None,
    ) -> Self:
        """Start ``argv`` under a shim, with nothing on its stdin.

        Args:
            env: the whole environment; None inherits ours. The mark of the job joins it.
            output: where stdout and stderr go: a file to append to, a descriptor, ``subprocess.PIPE``; None inherits.
            admission: held by the caller, who keeps it after the job; None takes it for the life of the job.
            grace_s: seconds between SIGTERM and SIGKILL, also when this process dies.
            wait: wait for a running job to end instead of failing, until ``give_up``; ``report`` hears for whom.
            preflight: called once the device is ours and empty; it may raise, and nothing is started then.

        Raises: BusyError, naming the holder; OrphanError; LockPathError.
        """
        directory = locks or LockDirectory.find()
        log_file = str(output) if isinstance(output, Path) else None
        job_uuid = str(uuid.uuid4())
        mark = marker.environment(job_uuid, directory.path)
        environment = child_environment(mark) if env is None else {**env, **mark}
        known = {"uuid": job_uuid, "argv": tuple(argv), "title": title, "unit": unit, "url": url}
        record = identity.of_process(os.getpid(), log_file=log_file, **known)
        held = admission or directory.take(ADMISSION, wait=wait, give_up=give_up, report=report)
        try:
            held.verify()
            held.write(record)
            residency = directory.take(RESIDENCY, wait=wait, give_up=give_up, report=report)
            leaf = None
            try:
                orphans.refuse(orphans.find(directory.path) if find_orphans is None else find_orphans())
                preflight()
                leaf = cgroup.create(job_uuid)
                process = _start_shim(argv, residency.fd, environment, cwd, output, grace_s, leaf)
                with suppress(ProcessLookupError):
                    residency.write(identity.of_process(process.pid, log_file=log_file, **known))
            except BaseException:
                if leaf:
                    cgroup.remove(leaf)
                raise
            finally:
                residency.close()  # the shim's copy keeps the lock
        except BaseException:
            if admission is None:
                held.release()
            raise
        return cls(process, record, admission=held, owns_admission=admission is None, grace_s=grace_s, cgroup_path=leaf)

    @property
    def pid(self) -> int:
        """Pid of the shim, which is the session of the job."""
        return self._shim.pid

    @property
    def stdout(self) -> IO[bytes] | None:
        """The reading end, when ``output`` was ``subprocess.PIPE``."""
        return self._shim.stdout

    def note(self, **changes: Any) -> None:
        """Update fields of the record that ``thor-spec status`` shows: ``phase``, ``url``, ``floor_bytes``, ..."""
        self.identity = replace(self.identity, **changes)
        self._admission.write(self.identity)

    def verify_lock(self) -> None:
        """Check that the lock still excludes others. Raises: LockPathError, as ``Lock.verify`` does."""
        self._admission.verify()

    def pids(self) -> tuple[int, ...]:
        """Return the live processes of the job, without the shim."""
        return tuple(process.pid for process in self._census())

    def poll(self) -> int | None:
        """Return the exit status of the command once no process of the job is left, else None; 128+n for a signal."""
        if self._exit_status is None:
            code = self._shim.poll()
            if code is None:
                if time.monotonic() >= self._census_at:
                    self._census()
                return None
            # An orderly shim leaves nobody. One that was killed itself leaves the job to us.
            if not self.members.kill():
                self._exit_status = code if code >= 0 else 128 - code
                if self.members.cgroup:
                    cgroup.remove(self.members.cgroup)
        return self._exit_status

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end of the job; return its exit status, or None after ``timeout_s``."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.poll()) is None and (left_s := deadline - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                self._shim.wait(min(left_s, CENSUS_TICK_S))
            if self._shim.returncode is not None:
                time.sleep(POLL_TICK_S)
        return code

    def stop(
        self,
        *,
        grace_s: float | None = None,
        skip_grace: Callable[[], bool] = lambda: False,
        kill_wait_s: float = KILL_WAIT_S,
    ) -> int:
        """Stop the job in order: SIGTERM to all its processes, a grace, SIGKILL. Return its exit status.

        Args:
            grace_s: seconds; at most the grace given at the start.
            skip_grace: asked during the grace, such as ``Event.is_set``; True ends it.

        Raises: StuckInKernelError, if a process survives; both locks stay held then.
        """
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + (self.grace_s if grace_s is None else grace_s)
        while self.poll() is None and time.monotonic() < deadline and not skip_grace():
            time.sleep(POLL_TICK_S)
        return self.kill(kill_wait_s=kill_wait_s)

    def kill(self, *, kill_wait_s: float = KILL_WAIT_S) -> int:
        """Kill what is left of the job without a grace, and return its exit status.

        Raises: StuckInKernelError, as ``stop`` does.
        """
        self._signal(shim.KILL_NOW)
        self._signal(signal.SIGCONT)  # a stopped shim would reap nobody
        if self.poll() is None:
            self.members.kill()  # not left to the shim alone: it may be slow when memory is short
        code = self.wait(kill_wait_s)
        if code is None:
            left = self._census() or [p for p in (processes.read(self.pid),) if p]
            named = ", ".join(f"pid {process.pid} ({process.name}, state {process.state})" for process in left)
            raise StuckInKernelError(
                f"Still alive {kill_wait_s:g} s after SIGKILL: {named}. A process that SIGKILL cannot end waits inside "
                "the kernel and keeps its memory, so no other job may start. Reboot the board."
            )
        return code

    def close(self) -> None:
        """Release admission, if this job took it and has ended."""
        if self._owns_admission and self.poll() is not None:
            self._admission.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.poll() is None:
            self.stop()
        self.close()

    def _signal(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            self._shim.send_signal(signum)

    def _census(self) -> list[processes.Process]:
        if self._exit_status is not None:
            return []  # the shim's pid may be another process by now
        self._census_at = time.monotonic() + CENSUS_TICK_S
        return self.members.census()


def _start_shim(
    argv: Sequence[str],
    lock_fd: int,
    env: Mapping[str, str] | None,
    cwd: Path | None,
    output: Path | int | None,
    grace_s: float,
    cgroup_path: str | None,
) -> subprocess.Popen[bytes]:
    options = ["--lock-fd", str(lock_fd), "--parent", str(os.getpid()), "--grace", str(grace_s)]
    options += ["--cgroup", cgroup_path] if cgroup_path else []
    # -P: a module in the working directory must not shadow the shim's own imports.
    command = [sys.executable, "-P", "-m", shim.__name__, *options, "--", *argv]
    opened = None
    if isinstance(output, Path):
        output = opened = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, shim.SIGNALS)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=env,
            cwd=cwd,
            pass_fds=(lock_fd,),
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        if opened is not None:
            os.close(opened)
