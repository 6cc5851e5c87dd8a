"""Work over an engine that is up for it alone: what comes back, and whose error."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from thor_spec.errors import EngineDeadError, InterruptedJobError, ThorSpecError
from thor_spec.serve import session
from thor_spec.serve.stop_requests import StopRequests

PLAN: Any = SimpleNamespace(resolved=SimpleNamespace(config=SimpleNamespace(model="m")))
TIMEOUT_S = 10


class Shown:
    """A display that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.told.append(name)


def engine(
    monkeypatch: pytest.MonkeyPatch, until: Callable[[StopRequests], bool], death: Exception | None = None
) -> None:
    """Put an engine in the supervisor's place that is ready at once, and ends by ``until`` or dies."""

    def serve(plan: Any, events: Any, *, stop: StopRequests, restarts: int) -> None:
        assert restarts == 0
        events.ready(SimpleNamespace(url="u"))
        deadline = time.monotonic() + TIMEOUT_S
        while not until(stop):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if death:
            raise death
        events.stopping()

    monkeypatch.setattr(session, "serve", serve)


def test_the_engine_is_up_as_long_as_the_work_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine(monkeypatch, lambda stop: stop.any)
    shown = Shown()
    assert session.while_served(PLAN, shown, lambda ready: f"done at {ready.url}") == "done at u"  # type: ignore[arg-type]
    assert shown.told == ["ready"]  # that it is stopped now is no news


def test_the_works_own_error_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "NOTICE_S", 0.01)
    engine(monkeypatch, lambda stop: stop.any)

    def work(_: object) -> None:
        raise ThorSpecError("no answer")

    with pytest.raises(ThorSpecError, match="no answer"):
        session.while_served(PLAN, Shown(), work)  # type: ignore[arg-type]


def test_a_dead_engines_error_wins_over_the_works(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(session, "NOTICE_S", 60)
    engine(monkeypatch, lambda stop: bool(asked) and not stop.any, EngineDeadError("dead"))

    def work(_: object) -> None:
        asked.append(1)
        raise ThorSpecError("connection refused")

    with pytest.raises(EngineDeadError, match="dead"):
        session.while_served(PLAN, Shown(), work)  # type: ignore[arg-type]


def test_a_stop_from_outside_ends_unfinished_work(monkeypatch: pytest.MonkeyPatch) -> None:
    engine(monkeypatch, lambda stop: True)
    shown = Shown()
    with pytest.raises(InterruptedJobError, match="before the work on m was done"):
        session.while_served(PLAN, shown, lambda _: time.sleep(0.5))  # type: ignore[arg-type]
    assert shown.told == ["ready", "stopping"]


def test_requests_that_a_stop_breaks_off_are_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = threading.Event()

    def until(stop: StopRequests) -> bool:
        stop.ask()
        stopped.set()
        return broken.wait(TIMEOUT_S)

    def work(_: object) -> None:
        stopped.wait(TIMEOUT_S)
        threading.Timer(0.1, broken.set).start()
        raise ThorSpecError("Server disconnected without sending a response.")

    stopped = threading.Event()
    engine(monkeypatch, until)
    with pytest.raises(InterruptedJobError, match="Stopped before the work on m was done"):
        session.while_served(PLAN, Shown(), work)  # type: ignore[arg-type]
