"""Start an engine, watch it to READY and beyond, and leave nothing behind."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from thor_spec import env
from thor_spec.errors import BusyError, LockPathError, StalledError
from thor_spec.guard.guarded import GuardedJob, Settings
from thor_spec.guard.locks import ADMISSION, Lock, LockDirectory
from thor_spec.guard.memory import ProcMemory
from thor_spec.guard.notify import Notifier
from thor_spec.serve import address, dump, golden, history, log, room
from thor_spec.serve.engine import Engine
from thor_spec.serve.events import Events
from thor_spec.serve.golden import Golden
from thor_spec.serve.plan import Plan
from thor_spec.serve.service_events import ServiceEvents
from thor_spec.serve.stop_requests import StopRequests
from thor_spec.vllm_plugin import seam

GRACE_S = 20.0  # a stop must be through within 30 s
RESTARTS = 1


def serve(
    plan: Plan,
    events: Events,
    *,
    clock: Callable[[], float] = time.monotonic,
    settings: Settings | None = None,
    notifier: Notifier | None = None,
    stop: StopRequests | None = None,
    restarts: int = RESTARTS,
) -> None:
    """Run the plan until a signal asks to stop; returns then, with the job gone and the locks free.

    Args:
        clock: of deadlines and liveness rules, in seconds. The memory watchdog has its own.
        settings: how the job is guarded; the plan's memory floor wins over it.
        notifier: the service manager; None takes the one that started this process, if one did.
        stop: asked from elsewhere, too, to end the engine; entered here.
        restarts: how often a stalled engine is started again.

    Raises: BusyError, OrphanError, LockPathError; CapacityError; ConfigError (address, log file, recording, golden
        answers); PlatformError (the plugin is not at work in the engine); EngineStartError; StartDeadlineError;
        CanaryError; EngineDeadError; StalledError, after the restarts; MemoryGuardError; GuardFailureError;
        StuckInKernelError; MemoryNotReturnedError.
    """
    began = clock()
    config = plan.resolved.config
    settings = settings or Settings()
    if config.memory_floor is not None:
        settings = replace(settings, floor_bytes=config.memory_floor)
    told = ServiceEvents(events, notifier or Notifier.from_environment())
    with stop or StopRequests() as stop:
        try:
            locks = LockDirectory.find()
            admission = locks.take(ADMISSION, wait=config.wait, give_up=lambda: stop.any, report=told.waiting)
        except BusyError:
            if stop.any:
                return  # asked to stop while it waited
            raise
        try:
            address.require_free(config.host, config.port)
            sources = settings.sources
            memory = ProcMemory(sources.meminfo, sources.pressure)
            room.require_cache(config.kv_cache_memory, memory, settings.floor_bytes, gpu=seam.has_gpu_build())
            log.require_recording(config.record)
            answers = golden.read(config.golden) if config.golden else ()  # a mistake shows before weights load
            service = _Service(plan, told, stop, admission, log.open_path(config.log_file), clock, settings, answers)
            for restarts_left in range(restarts, -1, -1):
                try:
                    service.run(began, may_restart=restarts_left > 0)
                    return
                except StalledError as error:
                    if not restarts_left or stop.any:
                        raise
                    told.notice(f"{error} It was stopped, and is started again, once.")
                    began = clock()
        finally:
            admission.release()


@dataclass(frozen=True, slots=True)
class _Service:
    """What stays the same when an engine is started again."""

    plan: Plan
    events: ServiceEvents
    stop: StopRequests
    admission: Lock
    log_file: Path
    clock: Callable[[], float]
    settings: Settings
    golden: Golden

    def run(self, began: float, *, may_restart: bool) -> None:
        """Run one engine, from its start to its end."""
        plan = self.plan
        start = history.key(plan.argv, seam.version() or "")
        with log.Tail(self.log_file) as tail, _receipts_folder() as receipts:
            environment = {**plan.child_environment(), env.RECEIPTS_VARIABLE: str(receipts)}
            with GuardedJob.start(
                plan.argv,
                settings=self.settings,
                notice=self.events.notice,
                env=environment,
                output=self.log_file,
                admission=self.admission,
                title=f"serve {plan.resolved.config.model}",
                url=plan.url,
                grace_s=GRACE_S,
            ) as guarded:
                engine = Engine(
                    plan,
                    guarded,
                    log_file=self.log_file,
                    tail=tail,
                    receipts=receipts,
                    events=self.events,
                    stop=self.stop,
                    clock=self.clock,
                    cached=history.was_ready(env.state_dir(), start),
                    golden=self.golden,
                )
                again = False
                try:
                    outcome = engine.to_ready()
                    if outcome is not None:
                        history.remember(env.state_dir(), start)
                        self.events.ready(engine.ready(outcome, self.clock() - began))
                        engine.to_end()
                except StalledError as error:
                    again = may_restart and not self.stop.any
                    raise StalledError(f"{error}{_dump(guarded, self.log_file, str(error))}") from error
                finally:
                    self.events.ending(again=again)
                if self.stop.any:
                    self.events.stopping()
                    guarded.stop(skip_grace=self.stop.urgent)


def _dump(guarded: GuardedJob, log_file: Path, reason: str) -> str:
    """Keep what the stalled engine shows, and return where to find it."""
    try:
        guarded.dump = dump.take(env.state_dir(), guarded.job.pids(), log_file, reason=reason)
    except OSError as error:
        return f" No dump could be written ({error.strerror}); see {log_file}."
    return f" Its stacks and logs are in {guarded.dump}."


@contextmanager
def _receipts_folder() -> Iterator[Path]:
    runtime = env.runtime_dir()
    try:
        runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="receipts-", dir=runtime))
    except OSError as error:
        raise LockPathError(
            f"{runtime} cannot be written ({error.strerror}), and the engine leaves its receipts there. "
            "Name another directory in THOR_SPEC_RUNTIME_DIR."
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
