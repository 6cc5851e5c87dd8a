"""An engine for as long as some work needs it: served under the guard, and stopped when the work is done."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from thor_spec.errors import InterruptedJobError
from thor_spec.guard.identity import Identity
from thor_spec.serve.background import in_thread
from thor_spec.serve.events import Events, Ready
from thor_spec.serve.phases import Phase
from thor_spec.serve.plan import Plan
from thor_spec.serve.stop_requests import StopRequests
from thor_spec.serve.supervisor import serve

T = TypeVar("T")
NOTICE_S = 2.0  # the engine's watch looks twice a second


def while_served(plan: Plan, events: Events, work: Callable[[Ready], T]) -> T:
    """Serve ``plan``, call ``work`` once the engine is ready, and stop it; return what ``work`` returned.

    The work runs in a thread, so that a dying engine ends it: its error wins over what the requests then meet.

    Raises: what ``supervisor.serve`` raises, what ``work`` raises, and InterruptedJobError when somebody else asked for
        the stop.
    """
    stop = StopRequests()
    session = _Session(events, work, stop)
    serve(plan, session, stop=stop, restarts=0)
    if session.answer is None or not session.answer.done() or session.cut_off:
        raise InterruptedJobError(f"Stopped before the work on {plan.resolved.config.model} was done.")
    return session.answer.result()


class _Session(Generic[T]):
    """The events of ``shown``, with the work begun at READY."""

    def __init__(self, shown: Events, work: Callable[[Ready], T], stop: StopRequests) -> None:
        self.answer: Future[T] | None = None
        self.cut_off = False
        """Whether the work failed after somebody else asked for the stop, which breaks its requests off."""
        self._shown = shown
        self._work = work
        self._stop = stop

    def waiting(self, holder: Identity | None) -> None:
        """Show for whom."""
        self._shown.waiting(holder)

    def phase(self, phase: Phase) -> None:
        """Show the phase."""
        self._shown.phase(phase)

    def ready(self, ready: Ready) -> None:
        """Begin the work."""
        self._shown.ready(ready)
        self.answer = in_thread(lambda: self._work(ready), name="work")
        self.answer.add_done_callback(self._done)

    def _done(self, answer: "Future[T]") -> None:
        if answer.exception() is None:
            self._stop.ask()
        elif self._stop.any:
            self.cut_off = True
        else:  # an engine that died tells more than the request that noticed
            timer = threading.Timer(NOTICE_S, self._stop.ask)
            timer.daemon = True
            timer.start()

    def notice(self, line: str) -> None:
        """Pass it on."""
        self._shown.notice(line)

    def stopping(self) -> None:
        """Say so only where the work is not done: its end is no news."""
        if self.answer is None or not self.answer.done():
            self._shown.stopping()
