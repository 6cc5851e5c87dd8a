"""Guarded jobs for tests: started here, or by a launcher of its own that a test may kill."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thor_spec.errors import BusyError, MemoryNotReturnedError
from thor_spec.guard import state
from thor_spec.guard.guarded import GuardedJob, Settings
from thor_spec.guard.locks import RESIDENCY, LockDirectory
from thor_spec.guard.memory import GIB
from thor_spec.guard.status import status

from .docker_stand_in import SPEC, Docker
from .series import FakeProc
from .waiting import alive, until

Guard = Callable[..., GuardedJob]
ESCAPED = "os.setsid(); ignore()"  # out of session and group, deaf to requests
DEAF = "ignore()"


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THOR_SPEC_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def guard(locks: LockDirectory, proc: FakeProc, state_dir: Path) -> Iterator[Guard]:
    """Start guarded jobs from this process; ``notices`` of each are in its list."""
    started: list[GuardedJob] = []

    def guard(argv: Any, **options: Any) -> GuardedJob:
        chosen = Settings(sources=proc.sources, **options.pop("settings", {}))
        options = {"locks": locks, "grace_s": 5.0, "find_orphans": tuple, "notice": lambda _: None, **options}
        started.append(GuardedJob.start(argv, settings=chosen, **options))
        until(lambda: started[-1].check() or started[-1].watchdog.beats)
        return started[-1]

    yield guard
    for job in started:
        if job.job.poll() is None:
            job.job.kill()
        job.watchdog.close()
        job.job.close()


@pytest.fixture
def guard_container(guard: Guard, docker: Docker) -> Guard:
    """Start guarded jobs in containers of the fake docker."""
    return lambda argv, **options: guard(argv, spec=SPEC, runtime=docker.runtime, **options)


def checked_until_raised(job: GuardedJob, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        job.check()
        time.sleep(0.01)
    pytest.fail("the guard raised nothing")


def ends_without_its_memory(job: GuardedJob, proc: FakeProc) -> None:
    """End a job of which 40 GiB stay away, and find it told and kept as 41."""
    proc.available(60.0)
    until(lambda: job.check() or (job.watchdog.least_available_bytes or 0) < 61 * GIB)
    with pytest.raises(MemoryNotReturnedError, match=r"40\.00 GiB.*drop_caches"), job:
        pass
    assert job.store.kept is not None
    assert job.store.kept.exit_code == 41


def is_free(locks: LockDirectory, pids: Iterable[int]) -> bool:
    """Return whether the device can be had; none of ``pids`` may live then."""
    try:
        lock = locks.take(RESIDENCY)
    except BusyError:
        return False
    living = [pid for pid in pids if alive(pid)]
    lock.release()
    assert not living
    return True


def record(state_dir: Path) -> state.StopRecord:
    return until(state.StateStore(state_dir).read)


GUARDED = """
import json, signal, sys, threading
from pathlib import Path
from thor_spec.guard.container_spec import ContainerSpec
from thor_spec.guard.guarded import GuardedJob, Settings
from thor_spec.guard.locks import LockDirectory
from thor_spec.guard.watchdog_handle import Sources

runtime, proc, grace, image, *argv = sys.argv[1:]
asked = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: asked.set())
locks = LockDirectory.find(system=Path("/nonexistent"), private=Path(runtime))
here = Path(proc)
sources = Sources(meminfo=here / "meminfo", pressure=here / "pressure", kernel_log=here / "kernel-log")
with GuardedJob.start(
    argv,
    spec=ContainerSpec(image=image) if image else None,
    settings=Settings(sources=sources),
    notice=lambda _: None,
    locks=locks,
    grace_s=float(grace),
    find_orphans=tuple,
) as guarded:
    while not guarded.watchdog.beats:
        guarded.check()
        asked.wait(0.005)
    print(json.dumps({"root": guarded.job.pid, "watchdog": guarded.watchdog.pid}), flush=True)
    while guarded.job.poll() is None and not asked.wait(0.05):
        guarded.check()
"""


class Launched:
    """A launcher in a process of its own, with a job and a watchdog, which a test may kill."""

    def __init__(self, locks: LockDirectory, proc: FakeProc, argv: Any, grace_s: float, image: str) -> None:
        arguments = (locks.path.parent, proc.sources.meminfo.parent, str(grace_s), image, *argv)
        self.process = subprocess.Popen([sys.executable, "-c", GUARDED, *arguments], stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        self.root, self.watchdog = told["root"], told["watchdog"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def launched(locks: LockDirectory, proc: FakeProc, state_dir: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def launch(argv: Any, grace_s: float = 0.3, image: str = "") -> Launched:
        started.append(Launched(locks, proc, argv, grace_s, image))
        return started[-1]

    yield launch
    for launcher in started:
        launcher.kill()
        for pid in (launcher.watchdog, launcher.root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        until(lambda: not status(locks).held)
        assert launcher.process.stdout is not None
        launcher.process.stdout.close()
