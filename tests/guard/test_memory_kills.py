"""What the watchdog kills for, how fast, and whom it leaves alone; memory that a job does not return."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from thor_spec.errors import MemoryGuardError, MemoryNotReturnedError
from thor_spec.guard import cgroup
from thor_spec.guard.memory import GIB, Reading

from .conftest import Bystander, Engine
from .guarding import DEAF, ESCAPED, Guard, Launched, checked_until_raised, ends_without_its_memory, record
from .series import FakeProc
from .waiting import alive, until


def test_row16_floor_crossing_kills_within_a_second(
    guard: Guard, engine: Engine, proc: FakeProc, state_dir: Path
) -> None:
    job = guard(engine.argv(DEAF, ESCAPED), title="demo")
    pids = [engine.pid(name) for name in ("first", "child1")]
    crossed = time.monotonic()
    proc.available(3.5)
    until(lambda: not any(alive(pid) for pid in pids))
    assert time.monotonic() - crossed < 1.0
    with pytest.raises(
        MemoryGuardError, match=r"floor: MemAvailable 3\.50 GiB .*margin to the floor -0\.50 GiB"
    ) as got:
        checked_until_raised(job)
    # Written by the watchdog itself, whatever becomes of the supervisor.
    found = record(state_dir)
    assert (found.exit_code, got.value.exit_code) == (30, 30)
    assert found.trigger is not None
    assert (found.trigger["kind"], found.title) == ("floor", "demo")
    assert found.margin_bytes == pytest.approx(-0.5 * GIB, abs=1 << 20)


def test_row16_the_kill_does_not_wait_for_the_disk(
    guard: Guard, engine: Engine, proc: FakeProc, state_dir: Path
) -> None:
    guard(engine.argv(DEAF))
    first = engine.pid("first")
    state_dir.mkdir(exist_ok=True)
    os.mkfifo(state_dir / "last.tmp")  # opening it for writing blocks until somebody reads
    crossed = time.monotonic()
    proc.available(3.5)
    until(lambda: not alive(first))
    assert time.monotonic() - crossed < 1.0


def test_row16_a_job_of_a_stopped_supervisor_and_shim_is_killed(
    launched: Callable[..., Launched], engine: Engine, proc: FakeProc
) -> None:
    launcher = launched(engine.argv(DEAF, ESCAPED))
    pids = [engine.pid(name) for name in ("first", "child1")]
    for pid in (launcher.process.pid, launcher.root):
        os.kill(pid, signal.SIGSTOP)
    proc.available(3.5)
    until(lambda: not any(alive(pid) for pid in pids))


def test_row16_the_watchdog_kills_alone_when_supervisor_and_shim_cannot(
    launched: Callable[..., Launched], engine: Engine, proc: FakeProc
) -> None:
    launcher = launched(engine.argv(DEAF, DEAF))
    child = engine.pid("child1")
    os.kill(launcher.process.pid, signal.SIGSTOP)
    os.kill(launcher.root, signal.SIGKILL)
    until(lambda: not alive(engine.pid("first")))  # the kernel ended it with the shim
    assert alive(child)
    proc.available(3.5)
    until(lambda: not alive(child))


def test_row16_bystanders_live(guard: Guard, engine: Engine, proc: FakeProc, bystander: Bystander) -> None:
    argv = engine.argv(DEAF)
    bystander("VLLM::EngineCore")
    bystander(sys.executable, *argv)
    bystander("python", "-P", "-m", "thor_spec.guard.watchdog", "--root", "1")
    job = guard(argv)
    proc.available(3.5)
    with pytest.raises(MemoryGuardError):
        checked_until_raised(job)
    job.job.kill()  # the fixture checks that nobody else was signalled


def test_a_memory_kill_ends_with_30_and_leaves_nothing(guard: Guard, engine: Engine, proc: FakeProc) -> None:
    proc.available(5.0)  # so little that the loss of the rest is not waited for
    job = guard(engine.argv(DEAF, ESCAPED))
    engine.pid("child1")
    proc.available(3.5)
    with pytest.raises(MemoryGuardError), job:
        checked_until_raised(job)
    assert job.job.poll() == 137
    kept = job.store.kept
    assert kept is not None
    assert kept.exit_code == 30


def test_pressure_kills(guard: Guard, engine: Engine, proc: FakeProc) -> None:
    job = guard(engine.argv(DEAF))
    proc.available(7.0)
    proc.pressure(50.0)
    with pytest.raises(MemoryGuardError, match=r"pressure: full avg10 50 %"):
        checked_until_raised(job)


def test_row28_nv_err_no_memory_kills_above_the_floor(guard: Guard, engine: Engine, proc: FakeProc) -> None:
    job = guard(engine.argv(DEAF))
    first = engine.pid("first")
    job.check()  # what the kernel said before the job counts for nothing
    said = time.monotonic()
    proc.kernel_says("6,2,2000,-;NVRM: Check failed; Out of memory [NV_ERR_NO_MEMORY] returned")
    until(lambda: not alive(first))
    assert time.monotonic() - said < 1.0
    with pytest.raises(MemoryGuardError, match=r"kernel log: NVRM: Check failed; Out of memory"):
        checked_until_raised(job)


def test_row26_memory_that_is_not_back_after_the_job_is_41(guard: Guard, engine: Engine, proc: FakeProc) -> None:
    job = guard(engine.argv("pass"), settings={"memory_wait_s": 0.2})
    ends_without_its_memory(job, proc)
    assert job.job.poll() is not None


def test_row26_the_cause_before_it_is_not_lost(guard: Guard, engine: Engine, proc: FakeProc) -> None:
    job = guard(engine.argv(DEAF), settings={"memory_wait_s": 0.2})
    proc.available(3.0)
    with pytest.raises(MemoryNotReturnedError, match=r"had ended with: The job was killed to keep the board"), job:
        checked_until_raised(job)


def test_memory_is_measured_once_the_device_is_ours(guard: Guard, engine: Engine, proc: FakeProc) -> None:
    def scan() -> tuple[()]:
        proc.available(77.0)  # what a job that was waited for has returned by now
        return ()

    assert guard(engine.argv("pass"), find_orphans=scan)._before_bytes == pytest.approx(77 * GIB, abs=1024)


class Unasked:
    """Memory that stays as it is, and counts how often it is looked at."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self.asked = 0

    def read(self) -> Reading:
        self.asked += 1
        return self._reading


def test_a_job_that_took_little_is_not_waited_for(guard: Guard, engine: Engine, proc: FakeProc) -> None:
    job = guard(engine.argv("pass"))
    proc.available(98.5)
    until(lambda: job.check() or (job.watchdog.least_available_bytes or 0) < 99 * GIB)
    job.memory = Unasked(job.memory.read())
    with job:
        pass
    assert job.store.kept is not None
    assert job.store.kept.exit_code == 0
    assert job.memory.asked == 1  # for the record


def test_a_floor_of_zero_switches_the_floor_off(guard: Guard, engine: Engine, proc: FakeProc) -> None:
    job = guard(engine.argv("pass"), settings={"floor_bytes": 0})
    proc.available(0.5)
    until(lambda: job.check() or job.watchdog.least_available_bytes == GIB // 2)
    seen = job.watchdog._heard
    until(lambda: job.check() or job.watchdog._heard > seen + 0.6)  # two more polls
    assert job.job.poll() is None
    proc.available(100.0)


def test_without_a_cgroup_everything_works_by_descent(
    guard: Guard, engine: Engine, proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "create", lambda _: None)
    job = guard(engine.argv(DEAF, "pass", ESCAPED))
    assert job.job.members.cgroup is None
    pids = [engine.pid(name) for name in ("first", "child1", "child2")]
    proc.available(3.0)
    until(lambda: not any(alive(pid) for pid in pids))
