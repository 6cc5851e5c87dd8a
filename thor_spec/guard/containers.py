"""One job in a container, seen by its launcher; the same surface as ``Job``.

The launcher keeps admission. Residency is locked by the container's own first process, through a bind mount of the
lock file: it outlives the launcher and the runtime's daemon. In between, the launcher probes that residency is free,
lets go, starts the container, and believes in it only once the lock is seen held.
"""

import math
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from thor_spec.errors import LockPathError, OrphanError, StuckInKernelError
from thor_spec.guard import container_cgroup, container_launch, identity, marker, orphans, processes
from thor_spec.guard.container_launch import CONFIRM_S
from thor_spec.guard.container_spec import ContainerSpec
from thor_spec.guard.identity import Identity
from thor_spec.guard.job import GRACE_S, KILL_WAIT_S, POLL_TICK_S
from thor_spec.guard.locks import ADMISSION, RESIDENCY, Lock, LockDirectory
from thor_spec.guard.runtime import CallFailedError, Container, ContainerRuntime, NoAnswerError
from thor_spec.guard.status import taken_by

ASK_TICK_S = 0.05
BLIND_ASK_TICK_S = 1.0  # where only the runtime can tell whether the container lives
FOLLOW_TICK_S = 1.0  # between two clients that die
DEAF_S = 30.0  # after no answer, the runtime is not asked again for this long
UNKNOWN_STATUS = 128 + signal.SIGKILL


class ContainerJob:
    """A started container. Leaving its ``with`` block stops it, removes it, and releases admission."""

    def __init__(
        self,
        container: Container,
        record: Identity,
        *,
        runtime: ContainerRuntime,
        admission: Lock,
        owns_admission: bool,
        grace_s: float,
        output: int | None,
    ) -> None:
        self.identity = record
        self.container = container
        self._runtime = runtime
        self._admission = admission
        self._owns_admission = owns_admission
        self._grace_s = grace_s
        self._exit_status: int | None = None
        self._removed = False
        self._asked_at = -math.inf
        self._deaf_until = -math.inf
        self._first = _first_process(container)
        self._cgroup = container_cgroup.of_container(self._first.pid, container.id) if self._first else None
        self._output = output
        self._follower: subprocess.Popen[bytes] | None = None
        self._followed_at: float | None = None
        self._follow()

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        spec: ContainerSpec,
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
        report: Callable[[Identity | None], None] | None = None,
        find_orphans: Callable[[], Iterable[orphans.Orphan]] | None = None,
        runtime: ContainerRuntime | None = None,
        confirm_s: float = CONFIRM_S,
    ) -> Self:
        """Start ``argv`` in a container; the other arguments are those of ``Job.start``, save these.

        Args:
            env: set inside; nothing of ours is inherited. Whoever may inspect the container sees it.
            cwd: a directory inside.
            output: a file to append to, or a descriptor; None is our own output. No pipe.
            confirm_s: seconds within which the container must hold residency.

        Raises: BusyError; OrphanError; LockPathError; PlatformError (no runtime, image or command that works);
            ContainerRuntimeError (no answer, or a failed call). What was created is removed, unless a call hangs.
        """
        directory = locks or LockDirectory.find()
        known = {"uuid": str(uuid.uuid4()), "argv": tuple(argv), "title": title, "unit": unit, "url": url}
        log_file = str(output) if isinstance(output, Path) else None
        record = identity.of_process(os.getpid(), log_file=log_file, **known)
        held = admission or directory.take(ADMISSION, wait=wait, report=report)
        created = sink = None
        try:
            held.verify()
            held.write(record)
            directory.take(RESIDENCY, wait=wait, report=report).release()
            # No call to the runtime before this point: who loses the race must not disturb the winner's container.
            client = runtime or ContainerRuntime.find()
            orphans.refuse(orphans.of_containers(client.containers()))
            orphans.refuse(orphans.find(directory.path) if find_orphans is None else find_orphans())
            sink = _open(output)
            created = container_launch.create(client, spec, argv, env or {}, cwd, directory, record.uuid)
            container = container_launch.start(client, created, directory, confirm_s)
            record = replace(record, container=container.id)
            held.write(record)
            job = cls(
                container,
                record,
                runtime=client,
                admission=held,
                owns_admission=admission is None,
                grace_s=grace_s,
                output=sink,
            )
        except BaseException as error:
            try:
                if created and isinstance(error, NoAnswerError):
                    container_launch.kill_without_runtime(created, directory, record.uuid)
                elif created:
                    container_launch.discard(client, created, error)
            finally:
                if sink is not None:
                    os.close(sink)
                if admission is None:
                    held.release()
            raise
        job._name_resident(directory)
        return job

    @classmethod
    def attach(
        cls,
        job_uuid: str | None = None,
        *,
        output: Path | int | None = None,
        locks: LockDirectory | None = None,
        admission: Lock | None = None,
        grace_s: float = GRACE_S,
        runtime: ContainerRuntime | None = None,
    ) -> Self:
        """Take over a running container whose launcher died, found by its label.

        Args:
            job_uuid: None takes the only one there is.

        Raises: BusyError, if its launcher lives; OrphanError, if no running container of this boot fits, or several;
            LockPathError, if it does not hold residency.
        """
        directory = locks or LockDirectory.find()
        held = admission or directory.take(ADMISSION)
        try:
            client = runtime or ContainerRuntime.find()
            running = [c for c in client.containers() if c.is_running and c.boot == processes.boot_id()]
            fitting = [c for c in running if c.locks == str(directory.path) and job_uuid in (None, c.job)]
            if len(fitting) != 1:
                named = ", ".join(c.describe() for c in running) or "none"
                raise OrphanError(
                    f"Of the running containers of this lock directory {len(fitting)} could be taken over, not one; "
                    f"running: {named}. End what is left with `thor-spec reap --yes`, and start again."
                )
            [container] = fitting
            if taken_by(directory, RESIDENCY) != container.pid:
                raise LockPathError(
                    f"{container.describe()} runs without the residency lock, so nothing keeps a second job off the "
                    "device. End it with `thor-spec reap --yes`."
                )
            record = identity.of_process(os.getpid(), uuid=container.job, container=container.id)
            fd = directory.open(RESIDENCY)
            resident = identity.read(fd)
            os.close(fd)
            if resident and resident.uuid == container.job:
                same = {name: getattr(resident, name) for name in ("argv", "title", "unit", "url", "phase")}
                record = replace(record, **same)
            held.write(record)
            return cls(
                container,
                record,
                runtime=client,
                admission=held,
                owns_admission=admission is None,
                grace_s=grace_s,
                output=_open(output),
            )
        except BaseException:
            if admission is None:
                held.release()
            raise

    @property
    def pid(self) -> int:
        """Pid of the container's first process on the host; 0 where it cannot be told."""
        return self._first.pid if self._first else 0

    def note(self, *, phase: str | None = None, url: str | None = None) -> None:
        """Update the record that ``thor-spec status`` shows."""
        self.identity = replace(self.identity, phase=phase or self.identity.phase, url=url or self.identity.url)
        self._admission.write(self.identity)

    def _name_resident(self, directory: LockDirectory) -> None:
        """Name the container's first process in the residency record: inside, the lock file is read-only."""
        if self._first is None:
            return
        with suppress(ProcessLookupError, LockPathError):
            resident = identity.of_process(self._first.pid, uuid=self.identity.uuid)
            lock = Lock(directory.path / RESIDENCY, directory.open(RESIDENCY))
            lock.write(
                replace(self.identity, pid=resident.pid, start_ticks=resident.start_ticks, boot_id=resident.boot_id)
            )
            lock.close()

    def pids(self) -> tuple[int, ...]:
        """Return the live processes of the job, by their pids on the host."""
        found = set(self._cgroup.pids()) if self._cgroup else set()
        if self._first and processes.is_same(self._first):
            found |= {self._first.pid, *(p.pid for p in processes.descendants(self._first.pid))}
        return tuple(sorted(pid for pid in found if (process := processes.read(pid)) and process.is_live))

    def poll(self) -> int | None:
        """Return the exit status of the command once no process of the container is left, else None.

        Where the runtime does not answer any more, the kernel's word suffices, and the status is 137.
        """
        if self._exit_status is None and not self._is_seen_alive():
            self._exit_status = self._end()
        if self._exit_status is None:
            self._follow()
        return self._exit_status

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end of the container; return its exit status, or None after ``timeout_s``."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.poll()) is None and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_TICK_S, left_s))
        return code

    def stop(
        self,
        *,
        grace_s: float | None = None,
        skip_grace: Callable[[], bool] = lambda: False,
        kill_wait_s: float = KILL_WAIT_S,
    ) -> int:
        """Stop the job in order: SIGTERM, a grace, SIGKILL. Return its exit status.

        Raises: StuckInKernelError, if the container survives; both locks stay held then.
        """
        deadline = time.monotonic() + (self._grace_s if grace_s is None else grace_s)
        if self.poll() is None:
            self._request("TERM", signal.SIGTERM)
        while self.poll() is None and time.monotonic() < deadline and not skip_grace():
            time.sleep(POLL_TICK_S)
        return self.kill(kill_wait_s=kill_wait_s)

    def kill(self, *, kill_wait_s: float = KILL_WAIT_S) -> int:
        """Kill the container without a grace, and return its exit status.

        Raises: StuckInKernelError, as ``stop`` does.
        """
        # The kernel needs no daemon; the daemon is for those who may not write to the control group.
        if self.poll() is None and not (self._cgroup and self._cgroup.kill()):
            self._request("KILL", signal.SIGKILL)
        code = self.wait(kill_wait_s)
        if code is None:
            raise StuckInKernelError(
                f"Still there {kill_wait_s:g} s after SIGKILL: {self.container.describe()}, pids "
                f"{' '.join(map(str, self.pids())) or 'unknown'}. It keeps its memory, so no other job may start. "
                f"See `{self._runtime.name} ps --all`; if it does not go, reboot the board."
            )
        return code

    def close(self) -> None:
        """Remove the container and release admission, if the job has ended.

        Raises: ContainerRuntimeError, if the container could not be removed; admission is released all the same.
        """
        if self.poll() is None:
            return
        if self._follower:
            with suppress(subprocess.TimeoutExpired):
                self._follower.wait(2)  # the last lines
            self._follower.kill()
            self._follower.wait()
            self._follower = None
        if self._output is not None:
            os.close(self._output)
            self._output = None
        try:
            if not self._removed:
                self._removed = self._runtime.remove(self.container.id)
                if not self._removed:
                    raise CallFailedError(
                        f"{self.container.describe()} has ended and cannot be removed, so the next start is refused. "
                        "Run `thor-spec reap --yes`."
                    )
        finally:
            if self._owns_admission:
                self._admission.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.poll() is None:
            self.stop()
        try:
            self.close()
        except (CallFailedError, NoAnswerError):
            if kind is None:  # what went wrong first tells more
                raise

    def _request(self, name: str, signum: int) -> None:
        """Signal the first process through the runtime, or ourselves where that gives no answer."""
        if time.monotonic() >= self._deaf_until:
            try:
                if self._runtime.signal(self.container.id, name):
                    return
            except NoAnswerError:
                self._deaf_until = time.monotonic() + DEAF_S
        if self._first:
            with suppress(PermissionError):
                processes.send(self._first, signum)

    def _is_seen_alive(self) -> bool:
        """Whether the kernel shows a process of the container; False may mean that it cannot be seen from here."""
        if self._first is None:
            return False
        return processes.is_same(self._first) or bool(self._cgroup and self._cgroup.is_populated)

    def _end(self) -> int | None:
        """Return the exit status that the runtime tells; None while it sees the container run, or does not say."""
        now = time.monotonic()
        if now >= max(self._deaf_until, self._asked_at + (ASK_TICK_S if self._first else BLIND_ASK_TICK_S)):
            try:
                found = self._runtime.inspect([self.container.id])
            except NoAnswerError:
                self._deaf_until = time.monotonic() + DEAF_S
            except CallFailedError:
                pass  # the daemon is being restarted; the container does not mind
            else:
                self._removed = not found
                if not found or not found[0].is_running:
                    return found[0].exit_code if found else UNKNOWN_STATUS
            self._asked_at = time.monotonic()
        return UNKNOWN_STATUS if self._first and time.monotonic() < self._deaf_until else None

    def _follow(self) -> None:
        """Keep the log coming: a client that dies does not touch the container, and is replaced."""
        now = time.time()  # the runtime's stamps are wall clock too
        if self._follower and self._follower.poll() is None:
            self._followed_at = now
        elif self._followed_at is None or now >= self._followed_at + FOLLOW_TICK_S:
            self._follower = self._runtime.follow(self.container.id, self._output, since=self._followed_at)
            self._followed_at = now


def _open(output: Path | int | None) -> int | None:
    if isinstance(output, Path):
        return os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return None if output is None else os.dup(output)


def _first_process(container: Container) -> processes.Process | None:
    """Return the container's first process, if it provably is: the runtime may be on another machine."""
    process = processes.read(container.pid) if container.pid else None
    if process is None or not process.is_live:
        return None
    proven = container_cgroup.of_container(process.pid, container.id) or marker.carries(process, container.job)
    return process if proven else None
