"""A container under the watchdog: the same triggers, orders and waits as for a job on the host."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from thor_spec.errors import BusyError, CapacityError, ContainerRuntimeError, MemoryGuardError
from thor_spec.guard import cgroup, marker
from thor_spec.guard.locks import RESIDENCY, LockDirectory
from thor_spec.guard.reap import Scope, reap
from thor_spec.guard.status import status

from .conftest import Engine
from .docker_stand_in import IMAGE, Docker
from .guarding import DEAF, ESCAPED, Guard, Launched, checked_until_raised, ends_without_its_memory, record
from .series import FakeProc
from .waiting import alive, until


def test_row16_a_floor_crossing_ends_the_container_and_removes_it(
    guard_container: Guard, engine: Engine, proc: FakeProc, docker: Docker, locks: LockDirectory, state_dir: Path
) -> None:
    proc.available(5.0)
    job = guard_container(engine.argv(DEAF, ESCAPED), title="demo")
    pids = [engine.pid(name) for name in ("first", "child1")]
    assert set(job.job.pids()) == set(pids)
    proc.available(3.5)
    until(lambda: not any(map(alive, pids)))  # nobody calls check: the watchdog does it alone
    with pytest.raises(MemoryGuardError, match=r"margin to the floor -0\.50 GiB"), job:
        checked_until_raised(job)
    assert (record(state_dir).exit_code, record(state_dir).title) == (30, "demo")
    assert docker.containers() == []
    assert not status(locks).held


def test_row16_without_a_control_group_the_first_process_is_killed(
    guard_container: Guard, engine: Engine, proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "of_container", lambda *_: None)
    deaf = "ignore(); signal.signal(signal.SIGUSR1, signal.SIG_IGN); signal.signal(signal.SIGUSR2, signal.SIG_IGN)"
    job = guard_container(engine.argv(deaf))
    assert job.job.members.cgroup is None
    first = engine.pid("first")
    proc.available(3.5)
    until(lambda: not alive(first))  # nobody calls check


def test_below_the_floor_no_container_is_made(
    guard_container: Guard, proc: FakeProc, docker: Docker, locks: LockDirectory
) -> None:
    proc.available(3.9)
    with pytest.raises(CapacityError, match=r"Only 3\.90 GiB .* the floor is 4\.00 GiB") as raised:
        guard_container(("sleep", "60"))
    assert raised.value.exit_code == 12
    assert docker.calls("create") == []
    assert not status(locks).held


def test_row02_a_killed_launcher_leaves_the_container_to_the_watchdog(
    launched: Callable[..., Launched], engine: Engine, docker: Docker, locks: LockDirectory
) -> None:
    launcher = launched(engine.argv("signal.signal(15, lambda *_: here('asked'))"), image=IMAGE, grace_s=0.5)
    first = engine.pid("first")
    assert launcher.root == first
    launcher.kill()
    with pytest.raises(BusyError) as raised:
        locks.take(RESIDENCY)
    assert raised.value.exit_code == 10
    until(lambda: not alive(first))
    assert engine.pid("asked") == first  # the order was kept
    until(lambda: not status(locks).held)
    until(lambda: not alive(launcher.watchdog))
    assert docker.calls("kill") == []  # it needs no daemon


def test_row03_launcher_and_watchdog_killed_leave_a_container_that_refuses_starts(
    launched: Callable[..., Launched], guard_container: Guard, engine: Engine, docker: Docker, locks: LockDirectory
) -> None:
    launcher = launched(engine.argv(DEAF), image=IMAGE)
    first = engine.pid("first")
    os.kill(launcher.watchdog, signal.SIGSTOP)
    os.kill(launcher.watchdog, signal.SIGKILL)
    launcher.kill()
    with pytest.raises(BusyError, match="launcher is gone"):
        guard_container(("true",))
    assert alive(first)
    done = reap(Scope(locks=locks, runtime=docker.runtime), grace_s=0)
    assert done.left == ()
    assert not alive(first)
    with guard_container(("true",)) as job:
        assert job.job.wait(10) == 0


def test_row04_the_first_process_of_a_container_takes_the_others_along(
    guard_container: Guard, engine: Engine, docker: Docker
) -> None:
    with guard_container(engine.argv("pass", ESCAPED)) as job:
        pids = [engine.pid(name) for name in ("first", "child1")]
        os.kill(pids[0], signal.SIGKILL)
        assert job.job.wait(10) == 137
        until(lambda: not any(map(alive, pids)))
    assert docker.containers() == []


def test_row24_the_watchdog_of_a_container_is_replaced(guard_container: Guard, engine: Engine, proc: FakeProc) -> None:
    job = guard_container(engine.argv(DEAF))
    first = job.watchdog.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: job.check() or (job.watchdog.pid != first and job.watchdog.beats))
    proc.available(3.5)
    until(lambda: not alive(engine.pid("first")))


def test_row26_the_memory_of_a_container_is_waited_for(
    guard_container: Guard, proc: FakeProc, docker: Docker, locks: LockDirectory
) -> None:
    job = guard_container(("sleep", "60"), settings={"memory_wait_s": 0.2})
    ends_without_its_memory(job, proc)
    assert docker.containers() == []
    assert not status(locks).held


def test_row07_a_container_that_cannot_be_removed_at_the_end_is_told_and_recorded(
    guard_container: Guard, docker: Docker, locks: LockDirectory, state_dir: Path
) -> None:
    job = guard_container(("sleep", "60"))
    docker.fault("rm", "refuse")
    with pytest.raises(ContainerRuntimeError, match=r"cannot be removed.*reap --yes"), job:
        pass
    assert (record(state_dir).exit_code, len(docker.calls("rm"))) == (42, 1)
    assert not status(locks).held


def test_a_watchdog_that_may_not_kill_says_so_and_the_runtime_does_it(
    guard_container: Guard, engine: Engine, proc: FakeProc, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As for a user in docker's group: the processes are root's, and so is their control group.
    monkeypatch.setattr(cgroup, "of_container", lambda *_: None)
    monkeypatch.setattr(marker, "carries", lambda *_: False)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    notices: list[str] = []
    proc.available(5.0)
    job = guard_container(engine.argv(DEAF), notice=notices.append)
    assert any("belong to another user" in line for line in notices)
    first = engine.pid("first")
    proc.available(3.5)
    with pytest.raises(MemoryGuardError), job:
        checked_until_raised(job)
    assert not alive(first)
    assert [call[2] for call in docker.calls("kill")] == ["KILL"]
    assert docker.containers() == []
