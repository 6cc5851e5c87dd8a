"""Engines outside every job are found by title, shown, and left alone."""

import os
import shutil
import signal
import sys
from collections.abc import Callable

import pytest

from thor_spec.errors import OrphanError
from thor_spec.guard import cgroup, orphans
from thor_spec.guard.locks import LockDirectory
from thor_spec.guard.status import status

from .conftest import Bystander, Engine, Launcher, Start
from .waiting import alive, until


def test_an_orphan_refuses_the_start_and_is_not_touched(
    start: Start, bystander: Bystander, locks: LockDirectory
) -> None:
    orphan = bystander("VLLM::EngineCore")
    with pytest.raises(OrphanError, match=rf"pid {orphan.pid} \(VLLM::EngineCore\)") as caught:
        start(("true",), find_orphans=orphans.find)
    assert caught.value.exit_code == 11
    assert not status(locks).held


def test_only_the_title_itself_counts(bystander: Bystander) -> None:
    others = {bystander(sys.executable, "VLLM::EngineCore").pid, bystander("less VLLM::notes").pid}
    assert not others & {orphan.pid for orphan in orphans.find()}


def test_other_users_are_not_ours(bystander: Bystander, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = bystander("VLLM::Worker").pid
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert pid not in {orphan.pid for orphan in orphans.find()}


def test_engines_of_a_supervised_job_are_no_orphans(start: Start) -> None:
    job = start(("bash", "-c", "(exec -a VLLM::EngineCore sleep 60) & wait"))
    engine = until(lambda: [p for p in job.pids() if orphans.processes.arguments(p)[:1] == ["VLLM::EngineCore"]])[0]
    assert engine not in {orphan.pid for orphan in orphans.find()}
    job.stop()
    assert not alive(engine)


def test_a_job_whose_lock_directory_was_deleted_is_found(start: Start, locks: LockDirectory) -> None:
    job = start(("sleep", "60"))
    until(job.pids)
    assert job.pid not in {orphan.pid for orphan in orphans.find()}
    shutil.rmtree(locks.path)
    with pytest.raises(OrphanError, match=rf"pid {job.pid} \(a job whose lock file was deleted\)"):
        start(("true",), find_orphans=orphans.find)


def test_row03_what_a_job_leaves_without_shim_and_watchdog_is_found_by_its_cgroup(
    launch: Callable[..., Launcher], engine: Engine, locks: LockDirectory
) -> None:
    launcher = launch(engine.argv("ignore()", "os.setsid(); ignore()"))
    shim = launcher.hear()["shim"]
    left = engine.pid("child1")
    if not any(left in cgroup.pids(path) for path in cgroup.leaves()):
        launcher.kill()
        pytest.skip("this machine lends no cgroup v2 to this user: without one, an untitled process is not found")
    os.kill(shim, signal.SIGKILL)
    launcher.kill()
    until(lambda: not alive(engine.pid("first")))
    assert not status(locks).held
    assert {orphan.pid: orphan.title for orphan in orphans.find()}[left].endswith("of a job that lost its shim")
    os.kill(left, signal.SIGKILL)
    until(lambda: left not in {orphan.pid for orphan in orphans.find()})
