"""A job with its watchdog: from the look at memory before the start to the record of how it ended."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from thor_spec import env
from thor_spec.errors import (
    CapacityError,
    ContainerRuntimeError,
    GuardFailureError,
    LockPathError,
    MemoryGuardError,
    MemoryNotReturnedError,
    StuckInKernelError,
    ThorSpecError,
)
from thor_spec.guard import memory_return, processes, state
from thor_spec.guard.container_spec import ContainerSpec
from thor_spec.guard.containers import ContainerJob
from thor_spec.guard.job import KILL_WAIT_S, Job
from thor_spec.guard.memory import MemorySource, ProcMemory, Reading, default_floor_bytes
from thor_spec.guard.triggers import gib
from thor_spec.guard.watchdog_handle import Sources, Watchdog

LOCK_CHECK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a job is guarded; the defaults are what THOR's users get."""

    floor_bytes: int | None = None
    """MemAvailable to defend; None takes 4 GiB or 3 % of all memory, whichever is more."""
    kill_wait_s: float = KILL_WAIT_S
    memory_wait_s: float = memory_return.LIMIT_S
    sources: Sources = field(default_factory=Sources)


class GuardedJob:
    """Leaving its ``with`` block ends the job, waits for its memory, and leaves a stop record."""

    def __init__(
        self,
        job: Job | ContainerJob,
        watchdog: Watchdog,
        memory: MemorySource,
        before_bytes: int,
        settings: Settings,
        notice: Callable[[str], None],
    ) -> None:
        self.job = job
        self.watchdog = watchdog
        self.cause: str | None = None
        """What the record says when no error ends the job."""
        self.exit_code = 0
        """What the launcher then exits with."""
        self.dump: Path | None = None
        self.memory = memory
        self._before_bytes = before_bytes
        self._settings = settings
        self._notice = notice
        self._noticed: list[str] = []
        self._store = state.StateStore(env.state_dir())
        self._began = time.monotonic()
        self._lock_check_at = 0.0
        self._lock_lost = False

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        spec: ContainerSpec | None = None,
        settings: Settings | None = None,
        notice: Callable[[str], None],
        **options: Any,
    ) -> Self:
        """Start a job and its watchdog; ``options`` are those of ``Job.start``, or of ``ContainerJob.start``.

        Args:
            spec: the container to run it in; None runs it on the host.
            notice: told, in the caller's thread, what a person should know.

        Raises: what the job's ``start`` does; CapacityError, if memory is below the floor before the start;
            PlatformError, if memory cannot be read.
        """
        settings = settings or Settings()
        memory = ProcMemory(settings.sources.meminfo, settings.sources.pressure)
        floor = settings.floor_bytes
        if floor is None:
            floor = default_floor_bytes(memory.read().total_bytes)
        before: list[Reading] = []

        def preflight() -> None:  # not earlier: the job that we waited for has returned its memory only now
            before.append(memory.read())
            _require_room(before[-1], floor)

        options["preflight"] = preflight
        job = ContainerJob.start(argv, spec=spec, **options) if spec else Job.start(argv, **options)
        try:
            watchdog = Watchdog(job, floor_bytes=floor, state_dir=env.state_dir(), sources=settings.sources)
            job.note(floor_bytes=floor)
        except BaseException:
            job.kill()
            job.close()
            raise
        if job.poll() is None and not job.members.may_be_killed():
            notice(
                "the container's processes belong to another user: a memory kill must go through the container runtime "
                "and is slower, and without it nobody can end them. Run thor-spec as root, or a rootless podman."
            )
        return cls(job, watchdog, memory, before[-1].available_bytes, settings, notice)

    @property
    def margin_bytes(self) -> int | None:
        """MemAvailable above the floor, now."""
        return self._margin(self.memory.read().available_bytes)

    @property
    def store(self) -> state.StateStore:
        """Where the stop record goes."""
        return self._store

    def note_phase(self, name: str) -> None:
        """Name the phase in every record."""
        self.job.note(phase=name)
        self.watchdog.phase(name)

    def check(self) -> None:
        """Look after watchdog and lock; call it several times a second.

        Raises: MemoryGuardError, once the watchdog has killed the job; GuardFailureError, when it is lost for good.
        """
        try:
            self.watchdog.check()
        finally:
            for line in self.watchdog.notices():
                self._tell(line)
            if trigger := self.watchdog.trigger:
                raise MemoryGuardError(
                    f"The job was killed to keep the board alive: {trigger.describe()}.\n"
                    "Give the engine less (--kv-cache-memory, --context, --max-seqs), or lower --memory-floor."
                )
        if time.monotonic() >= self._lock_check_at:
            self._lock_check_at = time.monotonic() + LOCK_CHECK_S
            self._check_lock()

    def stop(self, *, skip_grace: Callable[[], bool] = lambda: False) -> int:
        """Stop the job in order and return its exit status. Raises: StuckInKernelError."""
        return self.job.stop(skip_grace=skip_grace, kill_wait_s=self._settings.kill_wait_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        later: ThorSpecError | None = None
        try:
            if self.job.poll() is None:
                if isinstance(error, MemoryGuardError | GuardFailureError):
                    self.job.kill(kill_wait_s=self._settings.kill_wait_s)
                else:
                    self.stop()
            with suppress(GuardFailureError):
                self.watchdog.check()  # its last word
            self._await_memory()
            if isinstance(self.job, ContainerJob):
                self.job.remove()
        except (StuckInKernelError, MemoryNotReturnedError, ContainerRuntimeError) as found:
            later = found
            if isinstance(found, StuckInKernelError):
                for pid in self.job.pids():
                    self._tell(f"pid {pid} waits in the kernel: {' < '.join(processes.kernel_stack(pid).splitlines())}")
        finally:
            self.watchdog.close()
            self._leave_record(later or error, first=error if later else None)
            self.job.close()
        if later is not None:
            if error is not None and not isinstance(error, StuckInKernelError):
                later = type(later)(f"{later} It had ended with: {error}")
            raise later from error

    def _await_memory(self) -> None:
        least = self.watchdog.least_available_bytes
        if least is None or self._before_bytes - least <= memory_return.NEAR_BYTES:
            return  # it never took enough to be missed
        memory_return.await_return(self.memory, self._before_bytes, limit_s=self._settings.memory_wait_s)

    def _leave_record(self, error: BaseException | None, *, first: BaseException | None) -> None:
        job, watchdog = self.job.identity, self.watchdog
        cause = self.cause or "requested stop"
        code: int | None = self.exit_code
        if error is not None:
            cause = str(error) or type(error).__name__
            code = error.exit_code if isinstance(error, ThorSpecError) else None
        if first is not None:
            cause = f"{cause} It had ended with: {first}"
        record = state.stamped(
            {
                "cause": cause,
                "exit_code": code,
                "trigger": watchdog.trigger._asdict() if watchdog.trigger else None,
                "margin_bytes": watchdog.trigger.margin_bytes if watchdog.trigger else self.margin_bytes,
                "least_margin_bytes": self._margin(watchdog.least_available_bytes),
                "phase": job.phase,
                "uptime_s": round(time.monotonic() - self._began, 1),
                "log_tail": state.last_lines(job.log_file),
                "notices": tuple(self._noticed),
                "uuid": job.uuid,
                "title": job.title,
                "pid": job.pid,
                "log_file": job.log_file,
                "dump": str(self.dump) if self.dump else None,
            }
        )
        if problem := self._store.write(record):
            self._tell(problem)

    def _check_lock(self) -> None:
        try:
            self.job.verify_lock()
        except LockPathError as error:
            if not self._lock_lost:
                self._lock_lost = True
                self._tell(f"ALARM: {error} The running job goes on, and another could start beside it.")

    def _margin(self, available: int | None) -> int | None:
        return None if available is None else available - self.watchdog.floor_bytes

    def _tell(self, line: str) -> None:
        self._noticed.append(line)
        self._notice(line)


def _require_room(reading: Reading, floor_bytes: int) -> None:
    if reading.available_bytes < floor_bytes:
        raise CapacityError(
            f"Only {gib(reading.available_bytes)} of memory are available, and the floor is {gib(floor_bytes)}: the "
            "job would be killed at once. End other programs, run `sync; echo 3 | sudo tee /proc/sys/vm/drop_caches`, "
            "or lower --memory-floor."
        )
