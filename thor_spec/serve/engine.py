"""One engine between its start and its end: health, phases, receipts, canary, then service."""

import http.client
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from thor_spec.errors import EngineDeadError, EngineStartError, FailedRequestError, PlatformError
from thor_spec.guard import processes
from thor_spec.guard.guarded import GuardedJob
from thor_spec.guard.memory import GIB
from thor_spec.serve import failure, log
from thor_spec.serve.activity import ActivityReader
from thor_spec.serve.background import in_thread
from thor_spec.serve.events import Ready
from thor_spec.serve.golden import Golden
from thor_spec.serve.phases import Phase, phase_begun
from thor_spec.serve.plan import Plan
from thor_spec.serve.service_events import ServiceEvents
from thor_spec.serve.stop_requests import StopRequests
from thor_spec.serve.watch import ServingWatch, StartWatch
from thor_spec.vllm_plugin import receipt

if TYPE_CHECKING:
    from thor_spec.serve.canary import Outcome

POLL_S = 0.1
SERVING_POLL_S = 0.5  # the engine needs the cores now
HEALTH_TIMEOUT_S = 2.0
DEATH_S = 3.0
"""How long a dying engine may take to end after the first request that failed for it."""
THIN_MARGIN_BYTES = 2 * GIB


class Engine:
    """Watches one guarded job as an engine; every wait ends early for a stop, a dead job, or the guard."""

    def __init__(
        self,
        plan: Plan,
        guarded: GuardedJob,
        *,
        log_file: Path,
        tail: log.Tail,
        receipts: Path,
        events: ServiceEvents,
        stop: StopRequests,
        clock: Callable[[], float],
        cached: bool,
        golden: Golden,
    ) -> None:
        self._plan = plan
        self._golden = golden
        self._guarded = guarded
        self._job = guarded.job
        self._log_file = log_file
        self._tail = tail
        self._receipts = receipts
        self._events = events
        self._stop = stop
        self._clock = clock
        self._phase = Phase.START
        self._reader = ActivityReader(self._job.pids, log_file, guarded.memory)
        self._start_watch = StartWatch(self._reader, clock, cached=cached)
        self._enter(Phase.START)

    def to_ready(self) -> "Outcome | None":
        """Watch the start and run the canary; None when a stop was asked for meanwhile.

        Raises: EngineStartError, StartDeadlineError, PlatformError, CanaryError, and what the guard raises.
        """
        # Imported while the engine loads, not when it is up: the HTTP client and the parser take a third of a second.
        from thor_spec.serve import canary  # noqa: F401

        while not self._healthy():
            if self._stop.any:
                return None
            self._look_at_start("before it was ready")
            self._read_phases()
            self._job.wait(POLL_S)
        self._read_phases()
        self._require_plugin()
        self._enter(Phase.CANARY)
        return self._canary()

    def to_end(self) -> None:
        """Watch a ready engine until a stop is asked for. Raises: EngineDeadError, StalledError, and the guard's."""
        self._enter(Phase.READY)
        if thin := self._thin_margin():
            self._events.notice(thin)
        watch = ServingWatch(
            self._plan.url,
            self._plan.resolved.config.model,
            engines=self._engines(),
            api_key=self._plan.api_key,
            reader=self._reader,
            clock=self._clock,
            notice=self._events.notice,
            progressed=lambda: self._job.note(token_at_s=time.monotonic()),
        )
        while not self._stop.any:
            self._require_alive(EngineDeadError, "while it was serving")
            if watch.check():
                self._events.evaluated()
            if watch.engine_died:
                raise EngineDeadError(f"The engine ended while it was serving ({watch.engine_died}): {self._cause()}")
            self._job.wait(SERVING_POLL_S)

    def ready(self, outcome: "Outcome", seconds: float) -> Ready:
        """Return what READY reports."""
        plan = self._plan
        return Ready(
            url=plan.url,
            model=plan.resolved.config.model,
            drafter=plan.drafter.name if plan.drafter else None,
            draft_tokens=plan.draft_tokens,
            adaptive_drafts=plan.resolved.config.adaptive_drafts,
            tree=plan.tree,
            drafter_window=plan.resolved.config.drafter_window,
            accept=plan.acceptance.described,
            denoise=plan.denoising.described if plan.denoising else "",
            context=plan.context,
            kv=outcome.kv,
            recurrent_state=next((r.recurrent_state for r in receipt.collect(self._receipts) if r.recurrent_state), ""),
            prefix_caching=plan.prefix_caching.described,
            checks=outcome.checks,
            seconds=round(seconds, 2),
            pid=self._job.pid,
            log_file=self._log_file,
            margin_bytes=self._guarded.margin_bytes,
        )

    def _thin_margin(self) -> str:
        margin = self._guarded.margin_bytes
        if margin is None or margin >= THIN_MARGIN_BYTES:
            return ""
        return (
            f"only {margin / GIB:.2f} GiB are left above the memory floor, and a long prompt may take more: the guard "
            "would kill the engine. Lower --kv-cache-memory, --context or --max-seqs."
        )

    def _read_phases(self) -> None:
        for line in self._tail.new_lines():
            if begun := phase_begun(line, self._phase):
                self._enter(begun)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._guarded.note_phase(phase)
        if phase is not Phase.READY:
            self._start_watch.enter(phase)
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

    def _look_at_start(self, when: str) -> None:
        self._require_alive(EngineStartError, when)
        progressed = self._start_watch.check(self._tail.all_lines, self._log_file)
        if progressed is not None:
            self._events.evaluated()
        if progressed:
            self._events.progressed()

    def _require_alive(self, error: type[EngineStartError | EngineDeadError], when: str) -> None:
        self._guarded.check()
        receipt.require_none_failed(self._receipts)
        if (code := self._job.poll()) is None:
            return
        self._guarded.check()  # the watchdog speaks before it kills: its reason wins over what it caused
        receipt.require_none_failed(self._receipts)
        raise error(f"The engine ended {when} (status {code}): {self._cause()}")

    def _cause(self) -> str:
        return failure.told(failure.cause(self._tail.all_lines(), self._log_file), self._log_file)

    def _engines(self) -> list[processes.Process]:
        """Return the job's processes that left an engine's receipt, which names them as they know themselves."""
        if self._plan.stock:  # leaves no receipt
            return self._named()
        mine = {processes.pid_inside(pid): pid for pid in self._job.pids()}
        named = [mine[r.pid] for r in receipt.collect(self._receipts) if r.state == "engine" and r.pid in mine]
        return [process for pid in named if (process := processes.read(pid))]

    def _named(self) -> list[processes.Process]:
        """Return the job's processes by the names that vLLM gives to engines and their workers."""
        found = [process for pid in self._job.pids() if (process := processes.read(pid))]
        return [process for process in found if process.name.startswith("VLLM::")]

    def _workers(self) -> list[processes.Process]:
        """Return the job's processes without any of which it cannot answer."""
        return [*self._engines(), *self._named()]

    def _require_plugin(self) -> None:
        if not self._engines():
            raise PlatformError(
                "vLLM started without the thor_spec plugin in its engine process, so nothing that thor-spec promises "
                f"would hold. See {self._log_file} for 'Failed to load plugin', or reinstall thor-spec "
                "into the environment that runs vLLM."
            )
        wanted = self._plan.rope.as_dict() if self._plan.rope else {}
        for found in receipt.collect(self._receipts):
            rotated = found.rope.get("target", {})
            if found.state == "engine" and any(rotated.get(name) != value for name, value in wanted.items()):
                raise PlatformError(
                    f"--rope was ignored: asked for {wanted}, and the engine rotates by {dict(rotated) or 'its own'}. "
                    f"See {self._log_file}."
                )

    def _canary(self) -> "Outcome | None":
        from thor_spec.serve import canary

        plan = self._plan
        if plan.resolved.config.dummy_weights:
            return canary.unasked(plan.url)
        workers, said = self._workers(), len(self._tail.all_lines()) - 1
        # In a thread of its own, so that a stop or a dead engine is seen at once; it ends with its connections.
        answer = in_thread(
            lambda: canary.run(
                plan.url,
                plan.resolved.config.model,
                canary.Canary(
                    speculating=plan.drafter is not None,
                    tools=plan.may_call_tools and plan.context >= canary.TOOL_CONTEXT,
                    full=plan.full_canary,
                    context=plan.context,
                    acceptance_floor=plan.resolved.config.acceptance_floor,
                    golden=self._golden,
                    api_key=plan.api_key,
                    caching=bool(plan.prefix_caching.on) and plan.target.is_hybrid,
                ),
            ),
            name="canary",
        )
        while not answer.done():
            if self._stop.any:
                return None
            self._look_at_start("during the canary")
            wait([answer], SERVING_POLL_S)  # each look takes from the cores that the answers need
        if (error := answer.exception()) is not None:  # an engine that died tells more than the request that noticed
            failed = isinstance(error, FailedRequestError)
            self._require_survived(workers, said, wait_s=DEATH_S if failed else 2 * POLL_S)
        return answer.result()

    def _require_survived(self, workers: Sequence[processes.Process], said: int, *, wait_s: float) -> None:
        """Raise EngineStartError, where the job, one of ``workers`` or the log after ``said`` lines ends in time."""
        until = time.monotonic() + wait_s
        while True:
            self._require_alive(EngineStartError, "during the canary")
            ended = not all(processes.is_same(worker) for worker in workers)
            if ended or failure.tells_of_death(self._tail.all_lines()[said:]):
                self._job.wait(2 * POLL_S)  # the log's last lines
                self._require_alive(EngineStartError, "during the canary")
                raise EngineStartError(f"The engine ended during the canary: {self._cause()}")
            if time.monotonic() >= until:
                return
            self._job.wait(POLL_S)
