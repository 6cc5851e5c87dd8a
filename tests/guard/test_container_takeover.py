"""Containers whose launcher is gone: taken over, refused, or reaped."""

import os
import signal
import time
from dataclasses import replace

import pytest

from thor_spec.errors import (
    BusyError,
    LockPathError,
    OrphanError,
)
from thor_spec.guard import processes
from thor_spec.guard.containers import ContainerJob
from thor_spec.guard.locks import ADMISSION, RESIDENCY, LockDirectory
from thor_spec.guard.reap import Scope, reap
from thor_spec.guard.status import status, stop

from .conftest import Engine
from .docker_stand_in import SOME_JOB, SPEC, Contain, Docker
from .waiting import alive, until


def test_row06_a_new_launcher_takes_the_container_over(
    contain: Contain, docker: Docker, engine: Engine, locks: LockDirectory
) -> None:
    job = contain(engine.argv("pass"), title="demo")
    first = engine.pid("first")
    with pytest.raises(BusyError):
        ContainerJob.attach(locks=locks, runtime=docker.runtime)
    job._admission.close()  # as the launcher's death does
    with pytest.raises(BusyError, match=rf"launcher is gone.*pid {first} \(demo\)"):
        contain(("true",))
    with pytest.raises(OrphanError, match=r"without its launcher.*reap --yes"):
        stop(locks)
    with pytest.raises(OrphanError, match="0 could be taken over"):
        ContainerJob.attach(SOME_JOB, locks=locks, runtime=docker.runtime)
    second = ContainerJob.attach(locks=locks, runtime=docker.runtime, grace_s=5)
    assert (second.pid, second.identity.title, second.identity.uuid) == (first, "demo", job.identity.uuid)
    assert second.stop() == 128 + signal.SIGTERM
    second.close()
    assert docker.containers() == []
    assert not status(locks).held
    job._removed = True


def test_row06_a_container_without_the_lock_is_not_taken_over(docker: Docker, locks: LockDirectory) -> None:
    locks.take(ADMISSION).release()
    docker.leave(locks, job=SOME_JOB, state="running")
    with pytest.raises(LockPathError, match="without the residency lock"):
        ContainerJob.attach(locks=locks, runtime=docker.runtime)
    assert not status(locks).held


def test_row06_a_launcher_killed_at_any_moment_leaves_nothing_undetected(
    docker: Docker, engine: Engine, locks: LockDirectory
) -> None:
    locks.take(ADMISSION).release()
    scope = Scope(locks=locks, runtime=docker.runtime)
    outcomes = set()
    for delay_ms in (0, 60, 120, 180, 260, 340, None):
        if (launcher := os.fork()) == 0:
            try:
                os.setsid()
                ContainerJob.start(
                    engine.argv("ignore()"), spec=SPEC, locks=locks, find_orphans=tuple, runtime=docker.runtime
                )
                signal.pause()
            finally:
                os._exit(99)
        if delay_ms is None:
            until(lambda: status(locks).residency_held)
        else:
            time.sleep(delay_ms / 1000)
        os.kill(launcher, signal.SIGKILL)
        os.waitpid(launcher, 0)

        def clients() -> set[str]:
            orphaned = [process for process in processes.snapshot() if process.ppid == 1 and process.name != "daemon"]
            mine = [processes.arguments(process.pid) for process in orphaned]
            return {arguments[5] for arguments in mine if str(docker.state) in arguments}

        # A client that was started goes on, and between fork and exec it still shares the launcher's descriptors.
        until(lambda: not {"create", "start", "ps", "image", "inspect"} & clients())
        until(lambda: not status(locks).admission_held)
        held, left = status(locks).residency_held, docker.containers()
        if any(map(alive, engine.pids())):
            assert held  # an engine that lives holds the lock
        if held or left:
            with pytest.raises((BusyError, OrphanError)):
                ContainerJob.start(("true",), spec=SPEC, locks=locks, find_orphans=tuple, runtime=docker.runtime)
        outcomes.add((held, bool(left)))
        until(lambda: not status(locks).admission_held)
        assert reap(scope, grace_s=0).left == ()
        until(lambda: not status(locks).held)
        assert not any(map(alive, engine.pids()))
        assert docker.containers() == []
    assert (True, True) in outcomes
    assert len(outcomes) > 1


def test_row30_a_container_from_an_earlier_boot_is_listed(
    contain: Contain, docker: Docker, locks: LockDirectory
) -> None:
    docker.leave(locks, job=SOME_JOB, state="exited", boot="11111111-2222-3333-4444-555555555555")
    with pytest.raises(OrphanError, match=r"exited.*from an earlier boot"):
        contain(("true",))


def test_row30_a_record_from_an_earlier_boot_is_ignored(contain: Contain, locks: LockDirectory) -> None:
    from thor_spec.guard import identity

    me = identity.of_process(os.getpid(), uuid=SOME_JOB, container="c" * 64)
    earlier = replace(me, boot_id="11111111-2222-3333-4444-555555555555")
    for name in (ADMISSION, RESIDENCY):
        locks.take(name, earlier).close()
    assert (status(locks).held, status(locks).holder, status(locks).stale) == (False, None, True)
    assert contain(("true",)).wait(10) == 0
