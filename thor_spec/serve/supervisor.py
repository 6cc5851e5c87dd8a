"""Start an engine, watch it to READY and beyond, and leave nothing behind."""

import http.client
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from thor_spec import env
from thor_spec.errors import EngineDeadError, EngineStartError, LockPathError, PlatformError, with_exit_code
from thor_spec.guard.job import Job
from thor_spec.guard.locks import ADMISSION, LockDirectory
from thor_spec.serve import address, failure, log
from thor_spec.serve.events import Events, Ready
from thor_spec.serve.phases import Phase, phase_begun
from thor_spec.serve.plan import Plan
from thor_spec.serve.stop_requests import StopRequests
from thor_spec.vllm_plugin import receipt

if TYPE_CHECKING:
    from thor_spec.serve.canary import Outcome

POLL_S = 0.1
SERVING_POLL_S = 0.5  # the engine needs the cores now
HEALTH_TIMEOUT_S = 2.0
GRACE_S = 20.0  # a stop must be through within 30 s


def serve(plan: Plan, events: Events, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Run the plan until a signal asks to stop; returns then, with the job gone and the locks free.

    Raises: BusyError, OrphanError, LockPathError; ConfigError (address, log file); PlatformError (the plugin is not at
        work in the engine); EngineStartError; CanaryError; EngineDeadError; StuckInKernelError.
    """
    began = clock()
    config = plan.resolved.config
    with StopRequests() as stop:
        admission = LockDirectory.find().take(ADMISSION, wait=config.wait, report=events.waiting)
        try:
            address.require_free(config.host, config.port)
            log_file = log.open_path(config.log_file)
            tail = log.Tail(log_file)
            with _receipts_folder() as receipts:
                environment = env.child_environment({**plan.environment, env.RECEIPTS_VARIABLE: str(receipts)})
                with Job.start(
                    plan.argv,
                    env=environment,
                    output=log_file,
                    admission=admission,
                    title=f"serve {config.model}",
                    url=plan.url,
                    grace_s=GRACE_S,
                ) as job:
                    run = _Run(plan, job, tail, receipts, events, stop)
                    outcome = run.to_ready()
                    if outcome is not None:
                        events.ready(run.ready(outcome, clock() - began, log_file))
                        run.to_end()
                    if stop.any:
                        events.stopping()
                        job.stop(skip_grace=stop.urgent)
        finally:
            admission.release()


class _Run:
    """One engine between its start and its end."""

    def __init__(
        self, plan: Plan, job: Job, tail: log.Tail, receipts: Path, events: Events, stop: StopRequests
    ) -> None:
        self._plan = plan
        self._job = job
        self._tail = tail
        self._receipts = receipts
        self._events = events
        self._stop = stop
        self._phase = Phase.START
        events.phase(Phase.START)

    def to_ready(self) -> "Outcome | None":
        """Watch the start and run the canary; None when a stop was asked for meanwhile."""
        # Imported while the engine loads, not when it is up: the HTTP client and the parser take a third of a second.
        from thor_spec.serve import canary  # noqa: F401

        while not self._healthy():
            if self._stop.any:
                return None
            self._require_alive(EngineStartError, "before it was ready")
            self._read_phases()
            self._job.wait(POLL_S)
        self._read_phases()
        self._require_plugin()
        self._enter(Phase.CANARY)
        return self._canary()

    def to_end(self) -> None:
        """Watch a ready engine until a stop is asked for. Raises: EngineDeadError."""
        self._enter(Phase.READY)
        while not self._stop.any:
            self._require_alive(EngineDeadError, "while it was serving")
            self._job.wait(SERVING_POLL_S)

    def ready(self, outcome: "Outcome", seconds: float, log_file: Path) -> Ready:
        """Return what READY reports."""
        plan = self._plan
        return Ready(
            url=plan.url,
            model=plan.resolved.config.model,
            drafter=plan.drafter.name if plan.drafter else None,
            draft_tokens=plan.draft_tokens,
            context=plan.context,
            kv=outcome.kv,
            checks=outcome.checks,
            seconds=round(seconds, 2),
            pid=self._job.pid,
            log_file=log_file,
        )

    def _read_phases(self) -> None:
        for line in self._tail.new_lines():
            if begun := phase_begun(line, self._phase):
                self._enter(begun)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._job.note(phase=phase)
        self._events.phase(phase)

    def _healthy(self) -> bool:
        address = urlsplit(self._plan.url)
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _require_alive(self, error: type[EngineStartError | EngineDeadError], when: str) -> None:
        self._require_no_failed_receipt()
        if (code := self._job.poll()) is None:
            return
        self._require_no_failed_receipt()
        odd = failure.first_odd_line(self._tail.all_lines()) or "its log shows no error"
        raise error(f"The engine ended {when} (status {code}): {odd}\nSee {self._job.identity.log_file}.")

    def _require_no_failed_receipt(self) -> None:
        for found in receipt.collect(self._receipts):
            if found.state == "failed":
                raise with_exit_code(found.exit_code)(found.error)

    def _require_plugin(self) -> None:
        mine = set(self._job.pids())
        if not any(found.state == "engine" and found.pid in mine for found in receipt.collect(self._receipts)):
            raise PlatformError(
                "vLLM started without the thor_spec plugin in its engine process, so nothing that thor-spec promises "
                f"would hold. See {self._job.identity.log_file} for 'Failed to load plugin', or reinstall thor-spec "
                "into the environment that runs vLLM."
            )

    def _canary(self) -> "Outcome | None":
        from thor_spec.serve import canary

        plan = self._plan
        answer: Future[Outcome] = Future()

        def ask() -> None:
            try:
                outcome = canary.run(
                    plan.url,
                    plan.resolved.config.model,
                    speculating=plan.drafter is not None,
                    tools=plan.target.has_chat_template and plan.context >= canary.TOOL_CONTEXT,
                )
            except BaseException as error:  # noqa: BLE001  # raised again where the answer is read
                answer.set_exception(error)
            else:
                answer.set_result(outcome)

        # In a thread of its own, so that a stop or a dead engine is seen at once; it ends with its connections.
        threading.Thread(target=ask, name="canary", daemon=True).start()
        while not answer.done():
            if self._stop.any:
                return None
            self._require_alive(EngineStartError, "during the canary")
            wait([answer], POLL_S)
        if answer.exception() is not None:
            self._job.wait(2 * POLL_S)  # an engine that died tells more than the request that noticed
            self._require_alive(EngineStartError, "during the canary")
        return answer.result()


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
