"""A launcher in this process, and an engine that misbehaves on request."""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.guard.series import FakeProc
from tests.serve import fake_engine_path
from thor_spec.config import resolve
from thor_spec.guard import orphans
from thor_spec.guard.guarded import Settings
from thor_spec.guard.locks import ADMISSION, RESIDENCY, LockDirectory
from thor_spec.serve import command
from thor_spec.serve import plan as planning
from thor_spec.serve.checkpoint import open_checkpoint
from thor_spec.serve.events import Ready
from thor_spec.serve.phases import Phase
from thor_spec.serve.plan import Plan, make_plan
from thor_spec.serve.stop_requests import SIGNALS

Make = Callable[..., Plan]


class Recorder:
    """Events as they came; ``on_ready`` runs in the launcher's thread."""

    def __init__(self, on_ready: Callable[[Ready], None] = lambda ready: None) -> None:
        self.phases: list[Phase] = []
        self.was_ready: Ready | None = None
        self.stopped = False
        self.notices: list[str] = []
        self._on_ready = on_ready

    def waiting(self, holder: object) -> None:
        pass

    def phase(self, phase: Phase) -> None:
        self.phases.append(phase)

    def ready(self, ready: Ready) -> None:
        self.was_ready = ready
        self._on_ready(ready)

    def notice(self, line: str) -> None:
        self.notices.append(line)

    def stopping(self) -> None:
        self.stopped = True


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be blind to engines that other work on this machine may run."""
    monkeypatch.setattr(orphans, "refuse", lambda found: None)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Give back the signals that a process about to end ignores."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THOR_SPEC_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("THOR_SPEC_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "run"


@pytest.fixture
def calm(tmp_path: Path) -> Settings:
    """Memory in which nothing moves: that of this machine would count as a start's progress."""
    return Settings(sources=FakeProc(tmp_path / "calm").sources)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def plan(target: Path, drafter: Path, port: int, tmp_path: Path) -> Callable[..., Plan]:
    (target / "chat_template.jinja").write_text("{{ messages }}")

    def make(*faults: str, **options: Any) -> Plan:
        """Faults given here begin at once; those that ``begin`` writes, while it runs."""
        flags = {"model": str(target), "port": port, "log_file": tmp_path / "engine.log", **options}
        return Plan(
            resolved=resolve(flags),
            target=open_checkpoint("t", target),
            drafter=open_checkpoint("d", drafter),
            draft_tokens=7,
            context=2048,
            argv=(sys.executable, fake_engine_path(), str(port), f"control={tmp_path / 'faults'}", *faults),
            environment={"PYTHONPATH": str(Path(__file__).parents[2])},
        )

    return make


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(planning, "has_gpu_build", lambda: request.param)
    for name in ("TRITON_CACHE_DIR", command.START_METHOD):
        monkeypatch.delenv(name, raising=False)
    return bool(request.param)


@pytest.fixture
def make(target: Path, drafter: Path) -> Make:
    """Plan a start of the target and its drafter, which is not started."""

    def made(**flags: Any) -> Plan:
        return make_plan(resolve({"model": str(target), "draft": str(drafter), **flags}))

    return made


def value(plan: Plan, flag: str) -> str:
    return plan.argv[plan.argv.index(flag) + 1]


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


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., None]:
    """Let faults begin in the running engine."""

    def begin(*faults: str) -> None:
        draft = tmp_path / "faults.tmp"
        draft.write_text("\n".join(faults))
        draft.replace(tmp_path / "faults")

    return begin
