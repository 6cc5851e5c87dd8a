"""One job in a container, seen by its launcher; the same surface as ``Job``.

The launcher keeps admission. Residency is locked by the container's own first process, through a bind mount of the
lock file: it outlives the launcher and the runtime's daemon. In between, the launcher probes that residency is free,
lets go, starts the container, and believes in it only once the lock is seen held.
"""

import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from thor_spec.errors import LockPathError, OrphanError, StuckInKernelError
from thor_spec.guard import cgroup, container_launch, container_log, identity, marker, orphans, processes
from thor_spec.guard.container_launch import CONFIRM_S
from thor_spec.guard.container_log import ContainerLog
from thor_spec.guard.container_runtime import CallFailedError, Container, ContainerRuntime, NoAnswerError
from thor_spec.guard.container_spec import ContainerSpec
from thor_spec.guard.identity import Identity
from thor_spec.guard.job import GRACE_S, KILL_WAIT_S, POLL_TICK_S
from thor_spec.guard.locks import ADMISSION, RESIDENCY, Lock, LockDirectory
from thor_spec.guard.members import Members
from thor_spec.guard.status import taken_by

ASK_TICK_S = 0.05
BLIND_ASK_TICK_S = 1.0  # where only the runtime can tell whether the container lives
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
        self.grace_s = grace_s
        self.members = _members(container)
        self._runtime = runtime
        self._admission = admission
        self._owns_admission = owns_admission
        self._exit_status: int | None = None
        self._removed = False
        self._removal_failed = False
        self._asked_at = -math.inf
        self._deaf_until = -math.inf
        self._log = ContainerLog(runtime, container.id, output)

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
        give_up: Callable[[], bool] = lambda: False,
        report: Callable[[Identity | None], None] | None = None,
        find_orphans: Callable[[], Iterable[orphans.Orphan]] | None = None,
        preflight: Callable[[], None] = lambda: None,
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
        held = admission or directory.take(ADMISSION, wait=wait, give_up=give_up, report=report)
        created = sink = None
        try:
            held.verify()
            held.write(record)
            directory.take(RESIDENCY, wait=wait, give_up=give_up, report=report).release()
            # No call to the runtime before this point: who loses the race must not disturb the winner's container.
            client = runtime or ContainerRuntime.find()
            orphans.refuse(orphans.of_containers(client.containers()))
            orphans.refuse(orphans.find(directory.path) if find_orphans is None else find_orphans())
            preflight()
            sink = container_log.open_output(output)
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
                output=container_log.open_output(output),
            )
        except BaseException:
            if admission is None:
                held.release()
            raise

    @property
    def pid(self) -> int:
        """Pid of the container's first process on the host; 0 where it cannot be told."""
        return self.members.root.pid

    def note(self, **changes: Any) -> None:
        """Update fields of the record that ``thor-spec status`` shows."""
        self.identity = replace(self.identity, **changes)
        self._admission.write(self.identity)

    def verify_lock(self) -> None:
        """Check that admission still excludes others. Raises: LockPathError, as ``Lock.verify`` does."""
        self._admission.verify()

    def _name_resident(self, directory: LockDirectory) -> None:
        """Name the container's first process in the residency record: inside, the lock file is read-only."""
        with suppress(ProcessLookupError, LockPathError):
            resident = identity.of_process(self.pid, uuid=self.identity.uuid)
            lock = Lock(directory.path / RESIDENCY, directory.open(RESIDENCY))
            lock.write(
                replace(self.identity, pid=resident.pid, start_ticks=resident.start_ticks, boot_id=resident.boot_id)
            )
            lock.close()

    def pids(self) -> tuple[int, ...]:
        """Return the live processes of the job, by their pids on the host."""
        return tuple(process.pid for process in self.members.census())

    def poll(self) -> int | None:
        """Return the exit status of the command once no process of the container is left, else None.

        Where the runtime does not answer any more, the kernel's word suffices, and the status is 137.
        """
        if self._exit_status is None and not self._is_seen_alive():
            self._exit_status = self._end()
        if self._exit_status is None:
            self._log.follow()
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
        deadline = time.monotonic() + (self.grace_s if grace_s is None else grace_s)
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
        if self.poll() is None and not (self.members.cgroup and cgroup.kill(self.members.cgroup)):
            self._request("KILL", signal.SIGKILL)
        code = self.wait(kill_wait_s)
        if code is None:
            raise StuckInKernelError(
                f"Still there {kill_wait_s:g} s after SIGKILL: {self.container.describe()}, pids "
                f"{' '.join(map(str, self.pids())) or 'unknown'}. It keeps its memory, so no other job may start. "
                f"See `{self._runtime.name} ps --all`; if it does not go, reboot the board."
            )
        return code

    def remove(self) -> None:
        """Remove the container, if it has ended.

        Raises: ContainerRuntimeError, if that could not be done; it is tried once.
        """
        if self.poll() is None or self._removed or self._removal_failed:
            return
        self._removal_failed = True
        self._log.close()
        if not self._runtime.remove(self.container.id):
            raise CallFailedError(
                f"{self.container.describe()} has ended and cannot be removed, so the next start is refused. "
                "Run `thor-spec reap --yes`."
            )
        self._removed, self._removal_failed = True, False

    def close(self) -> None:
        """Remove the container and release admission, if the job has ended.

        Raises: ContainerRuntimeError, as ``remove`` does; admission is released all the same.
        """
        if self.poll() is None:
            return
        try:
            self.remove()
        finally:
            self._log.close()
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
        with suppress(PermissionError):
            processes.send(self.members.root, signum)

    def _is_seen_alive(self) -> bool:
        """Whether the kernel shows a process of the container; False may mean that it cannot be seen from here."""
        group = self.members.cgroup
        return processes.is_same(self.members.root) or bool(group and cgroup.is_populated(group))

    def _end(self) -> int | None:
        """Return the exit status that the runtime tells; None while it sees the container run, or does not say."""
        now = time.monotonic()
        if now >= max(self._deaf_until, self._asked_at + (ASK_TICK_S if self.pid else BLIND_ASK_TICK_S)):
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
        return UNKNOWN_STATUS if self.pid and time.monotonic() < self._deaf_until else None


def _members(container: Container) -> Members:
    """Return the container's processes; nobody, unless they provably are: the runtime may be on another machine."""
    first = processes.read(container.pid) if container.pid else None
    if first is None or not first.is_live:
        return Members(processes.NOBODY, has_shim=False)
    group = cgroup.of_container(first.pid, container.id)
    proven = group is not None or marker.carries(first, container.job)
    return Members(first if proven else processes.NOBODY, group, has_shim=False)
