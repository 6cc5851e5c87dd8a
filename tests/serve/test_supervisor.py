"""From the start to the end of an engine, with one that misbehaves in every way a launcher must notice."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serve import fake_engine_path
from thor_spec.config import resolve
from thor_spec.errors import (
    BusyError,
    CanaryError,
    ConfigError,
    EngineDeadError,
    EngineStartError,
    LockPathError,
    PlatformError,
)
from thor_spec.guard.locks import ADMISSION, RESIDENCY, LockDirectory
from thor_spec.serve import supervisor
from thor_spec.serve.checkpoint import open_checkpoint
from thor_spec.serve.events import Ready
from thor_spec.serve.phases import Phase
from thor_spec.serve.plan import Plan


class Recorder:
    """Events as they came; ``on_ready`` runs in the launcher's thread."""

    def __init__(self, on_ready: Callable[[Ready], None] = lambda ready: None) -> None:
        self.phases: list[Phase] = []
        self.was_ready: Ready | None = None
        self.stopped = False
        self._on_ready = on_ready

    def waiting(self, holder: object) -> None:
        pass

    def phase(self, phase: Phase) -> None:
        self.phases.append(phase)

    def ready(self, ready: Ready) -> None:
        self.was_ready = ready
        self._on_ready(ready)

    def stopping(self) -> None:
        self.stopped = True


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THOR_SPEC_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def plan(target: Path, drafter: Path, port: int, tmp_path: Path) -> Callable[..., Plan]:
    (target / "chat_template.jinja").write_text("{{ messages }}")

    def make(*faults: str, **options: Any) -> Plan:
        flags = {"model": str(target), "port": port, "log_file": tmp_path / "engine.log", **options}
        return Plan(
            resolved=resolve(flags),
            target=open_checkpoint("t", target),
            drafter=open_checkpoint("d", drafter),
            draft_tokens=7,
            context=2048,
            argv=(sys.executable, fake_engine_path(), str(port), *faults),
            environment={"PYTHONPATH": str(Path(__file__).parents[2])},
        )

    return make


def interrupt(*, times: int = 1) -> Callable[[Ready], None]:
    def send(ready: Ready) -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    return send


@contextmanager
def nothing_left_behind(port: int) -> Iterator[None]:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert left == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    directory = LockDirectory.find()
    for name in (ADMISSION, RESIDENCY):
        directory.take(name).release()
    assert not list(directory.path.parent.glob("receipts-*"))


def test_ready_then_stop(plan: Callable[..., Plan], port: int) -> None:
    recorder = Recorder(interrupt())
    with nothing_left_behind(port):
        supervisor.serve(plan("child"), recorder)
    assert recorder.phases == [Phase.START, Phase.WEIGHTS, Phase.SERVER, Phase.CANARY, Phase.READY]
    assert recorder.stopped
    ready = recorder.was_ready
    assert ready
    assert ready.checks == ("plain", "stream", "repeat", "tool call", "speculation")
    assert ready.kv
    assert (ready.kv.tokens, ready.kv.sequences, ready.draft_tokens) == (4096, 2.0, 7)


def test_a_tie_tipped_by_a_neighbour_is_no_fault(plan: Callable[..., Plan], port: int) -> None:
    recorder = Recorder(interrupt())
    with nothing_left_behind(port):
        supervisor.serve(plan("tie beside a neighbour"), recorder)
    assert recorder.was_ready


def test_a_second_signal_skips_the_grace(plan: Callable[..., Plan], port: int) -> None:
    began = time.monotonic()
    with nothing_left_behind(port):
        supervisor.serve(plan("deaf"), Recorder(interrupt(times=2)))
    assert time.monotonic() - began < supervisor.GRACE_S


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("die in load", EngineStartError, "ValueError: no such tensor: lm_head"),
        ("seam moved", PlatformError, "a seam moved"),
        ("no plugin", PlatformError, "without the thor_spec plugin"),
        ("nondeterministic", CanaryError, "gave different tokens"),
        ("short answer", CanaryError, "asked for 16 tokens"),
        ("bad tool call", CanaryError, "tool call came back malformed"),
        ("no drafts", CanaryError, "drafted nothing"),
        ("errors", CanaryError, "answered 500"),
        ("die in canary", EngineStartError, "RuntimeError: the kernel gave up"),
    ],
)
def test_what_goes_wrong_before_ready(
    plan: Callable[..., Plan], port: int, fault: str, error: type[Exception], says: str
) -> None:
    recorder = Recorder()
    with nothing_left_behind(port), pytest.raises(error, match=says):
        supervisor.serve(plan(fault), recorder)
    assert recorder.was_ready is None


def test_an_engine_that_dies_while_serving(plan: Callable[..., Plan], port: int) -> None:
    def kill(ready: Ready) -> None:
        (engine,) = [p for p in psutil.Process(ready.pid).children() if "fake_engine" in " ".join(p.cmdline())]
        engine.kill()

    with nothing_left_behind(port), pytest.raises(EngineDeadError, match=r"while it was serving \(status 137\)"):
        supervisor.serve(plan(), Recorder(kill))


@pytest.mark.parametrize("fault", ["hang in load", "hang in canary"])
def test_a_stop_before_ready(plan: Callable[..., Plan], port: int, fault: str) -> None:
    recorder = Recorder()
    wanted = Phase.WEIGHTS if fault == "hang in load" else Phase.CANARY

    def stop_when_there() -> None:
        while wanted not in recorder.phases and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    deadline = time.monotonic() + 30
    waiter = threading.Thread(target=stop_when_there, daemon=True)
    waiter.start()
    with nothing_left_behind(port):
        supervisor.serve(plan(fault), recorder)
    waiter.join()
    assert recorder.was_ready is None
    assert recorder.stopped


def test_a_busy_device_starts_nothing(plan: Callable[..., Plan], tmp_path: Path) -> None:
    held = LockDirectory.find().take(ADMISSION)
    with pytest.raises(BusyError):
        supervisor.serve(plan(), Recorder())
    held.release()
    assert not (tmp_path / "engine.log").exists()


def test_the_address_is_tried_before_the_engine(plan: Callable[..., Plan], port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"Port {port} of 127.0.0.1 is in use"):
            supervisor.serve(plan(), Recorder())
    with pytest.raises(ConfigError, match="not an address of this machine"):
        supervisor.serve(plan(host="192.0.2.1"), Recorder())
    with pytest.raises(ConfigError, match="names no address"):
        supervisor.serve(plan(host="no such host"), Recorder())


def test_an_unwritable_log(plan: Callable[..., Plan], port: int) -> None:
    with nothing_left_behind(port), pytest.raises(ConfigError, match="cannot be written"):
        supervisor.serve(plan(log_file=Path("/proc/no/engine.log")), Recorder())


def test_an_unwritable_runtime_directory(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THOR_SPEC_RUNTIME_DIR", "/proc/no")
    with pytest.raises(LockPathError):
        supervisor.serve(plan(), Recorder())
