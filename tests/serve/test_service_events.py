"""What a service manager hears over the life of an engine, on a real socket."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from thor_spec.errors import CanaryError, EngineDeadError, StalledError, StartDeadlineError
from thor_spec.guard.guarded import Settings
from thor_spec.guard.notify import Notifier
from thor_spec.serve import deadlines, supervisor
from thor_spec.serve.events import Ready
from thor_spec.serve.phases import Phase
from thor_spec.serve.plan import Plan
from thor_spec.serve.service_events import SLACK_S, STOP_S

from .conftest import Recorder, interrupt, nothing_left_behind
from .test_watch import Clock

MakePlan = Callable[..., Plan]
WATCHDOG_S = 60.0


class Manager:
    """The service manager's end: every message, in the order of arrival."""

    def __init__(self, address: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(address))
        self.notifier = Notifier(str(address), watchdog_s=WATCHDOG_S)
        self.heard: list[str] = []
        self._done = False
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        self._socket.settimeout(0.05)
        while not self._done:
            try:
                self.heard.append(self._socket.recv(4096).decode())
            except TimeoutError:
                continue

    def close(self) -> None:
        self._done = True
        self._thread.join()
        self._socket.close()

    def index(self, message: str) -> int:
        return next(i for i, heard in enumerate(self.heard) if heard.startswith(message))


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    found = Manager(tmp_path / "notify")
    yield found
    found.close()


def test_a_start_a_service_and_a_stop(plan: MakePlan, port: int, manager: Manager) -> None:
    with nothing_left_behind(port):
        supervisor.serve(plan(), Recorder(interrupt()), notifier=manager.notifier)
    manager.close()
    order = [
        manager.index(said)
        for said in ("STATUS=starting: start", "STATUS=starting: canary", "READY=1\nSTATUS=serving", "STOPPING=1")
    ]
    assert order == sorted(order)
    weights = manager.index("STATUS=starting: weights")
    expected_s = deadlines.longest_quiet_s(Phase.WEIGHTS) + SLACK_S
    assert manager.heard[weights + 1] == f"EXTEND_TIMEOUT_USEC={int(expected_s * 1e6)}"
    assert manager.heard[manager.index("STOPPING=1") + 1] == f"EXTEND_TIMEOUT_USEC={int(STOP_S * 1e6)}"
    assert sum(said.startswith("READY=1") for said in manager.heard) == 1


def test_a_start_without_progress_asks_for_no_more_time(
    plan: MakePlan, port: int, manager: Manager, calm: Settings
) -> None:
    recorder = Recorder()
    clock = Clock(recorder, Phase.WEIGHTS)
    with nothing_left_behind(port), pytest.raises(StartDeadlineError, match="no progress"):
        supervisor.serve(plan("hang in load"), recorder, clock=clock, settings=calm, notifier=manager.notifier)
    manager.close()
    weights, end = manager.index("STATUS=starting: weights"), manager.index("STOPPING=1")
    asked = [said for said in manager.heard[weights:end] if said.startswith("EXTEND")]
    fed = [said for said in manager.heard[weights:end] if said == "WATCHDOG=1"]
    # For the phase, and for what the interpreter still did as it began; looks that found nothing are no sign.
    assert len(asked) < len(fed)
    assert not any(said.startswith("READY") for said in manager.heard)


def test_only_a_completed_evaluation_feeds_the_watchdog(plan: MakePlan, port: int, manager: Manager) -> None:
    recorder = Recorder()

    def stop_when_fed(ready: Ready) -> None:
        def wait() -> None:
            seen = len(manager.heard)
            while manager.heard[seen:].count("WATCHDOG=1") < 3:
                threading.Event().wait(0.01)
            interrupt()(ready)

        threading.Thread(target=wait).start()

    recorder._on_ready = stop_when_fed
    clock = Clock(recorder, Phase.READY)
    with nothing_left_behind(port):
        supervisor.serve(plan(), recorder, clock=clock, notifier=manager.notifier)
    manager.close()
    after = manager.heard[manager.index("READY=1") : manager.index("STOPPING=1")]
    assert after.count("WATCHDOG=1") >= 3
    assert not any(said.startswith("EXTEND") for said in after)


def test_row17_a_restart_is_announced_and_given_its_time(
    plan: MakePlan, port: int, manager: Manager, begin: Callable[..., None]
) -> None:
    recorder = Recorder(lambda _: begin("stuck running"))
    with nothing_left_behind(port), pytest.raises(StalledError):
        supervisor.serve(plan(), recorder, clock=Clock(recorder, Phase.READY), notifier=manager.notifier)
    manager.close()
    pause = manager.index("STATUS=stopping a stalled engine")
    assert manager.heard[pause + 1] == f"WATCHDOG_USEC={int(STOP_S * 1e6)}\nWATCHDOG=1"
    assert manager.index("STOPPING=1") > pause
    ready = [i for i, said in enumerate(manager.heard) if said.startswith("READY=1")]
    assert len(ready) == 2
    assert manager.heard[ready[1] + 1] == f"WATCHDOG_USEC={int(WATCHDOG_S * 1e6)}\nWATCHDOG=1"
    assert manager.heard[pause + 1 : ready[1]].count("WATCHDOG=1") >= 1  # the rules of the start were gone through


@pytest.mark.parametrize(("fault", "error"), [("nondeterministic", CanaryError), ("engine apart", EngineDeadError)])
def test_a_failure_is_a_stop_too(
    plan: MakePlan, port: int, manager: Manager, fault: str, error: type[Exception]
) -> None:
    import psutil

    recorder = Recorder(lambda ready: psutil.Process(ready.pid).children()[0].children()[0].kill())
    with nothing_left_behind(port), pytest.raises(error):
        supervisor.serve(plan(fault), recorder, notifier=manager.notifier)
    manager.close()
    assert manager.index("STOPPING=1") > 0
