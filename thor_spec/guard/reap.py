"""What a job left behind, and ending it in order; nothing else is ever signalled.

Three proofs count: a container with our label, a process with a job's mark in its environment, a process in a control
group made for a job. Titles do not. All three name the lock directory, and what belongs to another one is left alone.

Ending takes the admission lock first: then no launcher lives under these locks, and whatever carries a mark is left
over. Where the lock directory is damaged, no start is possible and the mark alone decides.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from thor_spec import env
from thor_spec.errors import ConfigError, LockPathError, PlatformError
from thor_spec.guard import cgroup, identity, marker, processes
from thor_spec.guard.container_runtime import CallFailedError, Container, ContainerRuntime, NoAnswerError
from thor_spec.guard.job import GRACE_S, KILL_WAIT_S
from thor_spec.guard.locks import ADMISSION, RESIDENCY, Lock, LockDirectory
from thor_spec.guard.processes import Process
from thor_spec.guard.status import status

POLL_TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class Leftover:
    """One thing that a job left: a container, or a process (``pid`` not 0)."""

    job: str
    what: str
    pid: int = 0

    def describe(self) -> str:
        """Return one line."""
        job = f", job {self.job}" if self.job else ""
        return (f"pid {self.pid} ({self.what})" if self.pid else self.what) + job


@dataclass(frozen=True, slots=True)
class Reaped:
    """What was ended, and what could not be."""

    ended: tuple[Leftover, ...]
    left: tuple[Leftover, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Whose leftovers: those under one lock directory, or only those of this run of a systemd unit."""

    locks: LockDirectory
    invocation: str | None = None
    cgroups: Sequence[str] = ()
    """Control groups made for jobs; whoever is in them belongs to one."""
    runtime: ContainerRuntime | None = None
    spared: frozenset[str] = field(default=frozenset())
    """Jobs whose launcher lives."""

    @classmethod
    def of_unit(cls, locks: LockDirectory, *, runtime: ContainerRuntime | None = None) -> "Scope":
        """Return the scope of the systemd unit that runs this process.

        Raises: ConfigError, outside a unit.
        """
        invocation = env.invocation_id()
        if invocation is None:
            raise ConfigError("--own is for a systemd unit (ExecStopPost=), and no unit runs this. Leave it out.")
        return cls(locks=locks, invocation=invocation, cgroups=unit_job_cgroups(), runtime=runtime)

    def containers(self) -> list[Container]:
        """Return the containers in this scope. Raises: NoAnswerError."""
        if self.runtime is None:
            return []
        try:
            found = self.runtime.containers()
        except CallFailedError:
            return []  # no daemon, or no permission to ask it
        return [container for container in found if self._has(container)]

    def processes(self) -> list[Process]:
        """Return the live processes in this scope."""
        found = {
            marked.process.pid: marked.process
            for marked in marker.find(self.locks.path)
            if marked.job not in self.spared and self.invocation in (None, marked.invocation)
        }
        for pid in (pid for group in self.cgroups for pid in cgroup.pids(group)):
            process = processes.read(pid)
            if process and process.is_live and pid != os.getpid():
                found[pid] = process
        return list(found.values())

    def _has(self, container: Container) -> bool:
        return (
            container.locks in (None, str(self.locks.path))
            and container.job not in self.spared
            and self.invocation in (None, container.invocation)
        )


def find(scope: Scope) -> tuple[Leftover, ...]:
    """Return what is left over, without touching it; a job whose launcher lives is not.

    Raises: NoAnswerError, if the container runtime hangs.
    """
    if scope.invocation is None:
        scope = _sparing_the_living(scope)
    return _leftovers(scope.containers(), scope.processes())


def reap(
    scope: Scope,
    *,
    grace_s: float = GRACE_S,
    kill_wait_s: float = KILL_WAIT_S,
    skip_grace: Callable[[], bool] = lambda: False,
) -> Reaped:
    """End what is left over: SIGTERM, a grace, SIGKILL; containers are removed as well.

    Raises: BusyError, if a launcher lives under these locks; NoAnswerError, if the container runtime hangs.
    """
    admission = _admission(scope)
    try:
        no_answer: NoAnswerError | None = None
        containers: list[Container] = []
        try:
            containers = scope.containers()
        except NoAnswerError as error:
            no_answer = error  # the processes can be ended all the same
        found = _leftovers(containers, scope.processes())
        for container in containers:
            _end_container(scope, container, grace_s, skip_grace)
        # After the containers: their processes carry the mark too, and end with them.
        _end_processes(scope.processes, grace_s, kill_wait_s, skip_grace)
        if no_answer:
            raise no_answer
        for container in scope.containers():  # a daemon that was busy ending it may have refused
            _remove(scope, container)
        left = _leftovers(scope.containers(), scope.processes())
    finally:
        if admission:
            admission.release()
    # By identity of the thing: a container may have changed its state meanwhile.
    remaining = {(one.job, one.pid) for one in left}
    return Reaped(ended=tuple(one for one in found if (one.job, one.pid) not in remaining), left=left)


def job_cgroups(locks: LockDirectory) -> tuple[str, ...]:
    """Return the control groups of jobs under these locks: those whose uuid a lock's record or a mark names."""
    if not (groups := list(cgroup.leaves())):
        return ()
    known = {marked.job for marked in marker.find(locks.path)}
    for name in (ADMISSION, RESIDENCY):
        with suppress(LockPathError, OSError):
            fd = locks.open(name)
            record = identity.read(fd)
            os.close(fd)
            known |= {record.uuid} if record else set()
    return tuple(group for group in groups if cgroup.job_of(group) in known)


def unit_job_cgroups() -> tuple[str, ...]:
    """Return the control groups of jobs below our systemd unit's own; none where no unit runs this process."""
    parts = (cgroup.of_process() or "").split("/")
    index = next((i for i, part in enumerate(parts) if part.endswith(".service")), None)
    return tuple(cgroup.job_groups("/".join(parts[: index + 1]))) if index is not None else ()


def _admission(scope: Scope) -> Lock | None:
    if scope.invocation is not None:
        return None  # our own main process has ended; whoever holds the lock now is somebody else
    try:
        return scope.locks.take(ADMISSION, identity.of_process(os.getpid(), uuid="reap", title="reap"))
    except LockPathError:
        return None


def _sparing_the_living(scope: Scope) -> Scope:
    try:
        seen = status(scope.locks)
    except LockPathError:
        return scope
    if not seen.admission_held:
        return scope
    if seen.holder:
        jobs = {seen.holder.uuid}
    else:  # someone is at work, and it cannot be told who: nothing is known to be left over
        jobs = {marked.job for marked in marker.find(scope.locks.path)} | {c.job for c in scope.containers()}
    return Scope(
        locks=scope.locks,
        invocation=scope.invocation,
        cgroups=tuple(group for group in scope.cgroups if cgroup.job_of(group) not in jobs),
        runtime=scope.runtime,
        spared=frozenset(jobs),
    )


def _leftovers(containers: Iterable[Container], found: Iterable[Process]) -> tuple[Leftover, ...]:
    return (
        *(Leftover(container.job, container.describe()) for container in containers),
        *(Leftover(marker.job_of(process), marker.title_of(process), process.pid) for process in found),
    )


def _end_container(scope: Scope, container: Container, grace_s: float, skip_grace: Callable[[], bool]) -> None:
    """End and remove one container; what does not work shows in the next listing."""
    runtime = scope.runtime
    if runtime is None:
        return
    if container.is_running:
        first = processes.read(container.pid) if container.pid else None
        group = cgroup.of_container(container.pid, container.id) if first else None
        with suppress(NoAnswerError):
            runtime.signal(container.id, "TERM")
        deadline = time.monotonic() + grace_s
        while first and processes.is_same(first) and time.monotonic() < deadline and not skip_grace():
            time.sleep(POLL_TICK_S)
        if not (group and cgroup.is_populated(group) and cgroup.kill(group)):
            with suppress(NoAnswerError):
                runtime.signal(container.id, "KILL")
    _remove(scope, container)


def _remove(scope: Scope, container: Container) -> None:
    if scope.runtime is not None:
        with suppress(NoAnswerError, CallFailedError):
            scope.runtime.remove(container.id)


def _end_processes(
    scan: Callable[[], list[Process]], grace_s: float, kill_wait_s: float, skip_grace: Callable[[], bool]
) -> None:
    first = scan()
    for process in _without_those_below_a_shim(first):
        _send(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while first and time.monotonic() < deadline and not skip_grace():
        time.sleep(POLL_TICK_S)
        first = [process for process in first if processes.is_same(process)] or scan()
    deadline = time.monotonic() + kill_wait_s
    while (left := scan()) and time.monotonic() < deadline:
        for process in left:
            _send(process, signal.SIGKILL)
        time.sleep(POLL_TICK_S)


def _without_those_below_a_shim(found: Sequence[Process]) -> list[Process]:
    """Return those to be asked to stop: a shim passes it on, and twice would mean "at once" to some engines."""
    shims = [process.pid for process in found if marker.is_shim(process)]
    below = {process.pid for pid in shims for process in processes.descendants(pid)}
    return [process for process in found if process.pid not in below]


def _send(process: Process, signum: int) -> None:
    with suppress(PermissionError):
        processes.send(process, signum)


def any_runtime() -> ContainerRuntime | None:
    """Return the container runtime of this machine, if there is one."""
    try:
        return ContainerRuntime.find()
    except PlatformError:
        return None
