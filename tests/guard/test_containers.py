"""A job in a container: one holder, one lock, and no client or daemon whose death matters."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from thor_spec.errors import (
    BusyError,
    ContainerRuntimeError,
    LockPathError,
    OrphanError,
    PlatformError,
    StuckInKernelError,
)
from thor_spec.guard import orphans
from thor_spec.guard.containers import ContainerJob
from thor_spec.guard.job import Job
from thor_spec.guard.locks import ADMISSION, RESIDENCY, LockDirectory
from thor_spec.guard.status import status

from .conftest import Engine, Start
from .docker_stand_in import IMAGE, SOME_JOB, Contain, Docker
from .waiting import PYTHON, alive, until


def test_output_exit_status_and_nothing_left(
    contain: Contain, docker: Docker, locks: LockDirectory, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    body = "import sys; print('out', flush=True); print('err', file=sys.stderr); sys.exit(7)"
    with contain((*PYTHON, body), output=log) as job:
        assert job.wait(10) == 7
    assert sorted(log.read_text().split()) == ["err", "out"]
    assert docker.containers() == []
    assert not status(locks).held


def test_the_container_holds_residency_and_the_launcher_admission(
    contain: Contain, engine: Engine, locks: LockDirectory
) -> None:
    job = contain(engine.argv("pass", "pass"), title="demo")
    pids = [engine.pid("first"), engine.pid("child1")]
    assert job.pid == pids[0]
    assert set(job.pids()) == set(pids)
    seen = status(locks)
    assert (seen.admission_held, seen.residency_held, seen.holder) == (True, True, job.identity)
    assert job.identity.container == job.container.id
    with pytest.raises(BusyError):
        locks.take(RESIDENCY)
    job.note(phase="ready")
    assert status(locks).holder == job.identity
    os.kill(pids[0], signal.SIGKILL)
    assert job.wait(10) == 137
    assert not any(map(alive, pids))


def test_row01_the_loser_of_a_race_calls_no_docker(contain: Contain, docker: Docker, locks: LockDirectory) -> None:
    contain(("sleep", "60"))
    before = docker.calls()
    begun = time.monotonic()
    with pytest.raises(BusyError, match=rf"pid {os.getpid()}"):
        contain(("true",))
    assert time.monotonic() - begun < 2
    assert docker.calls() == before


def test_row01_two_starts_at_once_make_one_container(locks: LockDirectory, docker: Docker, tmp_path: Path) -> None:
    locks.take(ADMISSION).release()
    docker.fault("create", "slow")
    body = (
        "import sys\nfrom pathlib import Path\nfrom thor_spec.errors import ThorSpecError\n"
        "from thor_spec.guard.containers import ContainerJob\n"
        "from thor_spec.guard.container_spec import ContainerSpec\n"
        "from thor_spec.guard.locks import LockDirectory\n"
        "sys.stdin.read(1)\n"
        "try:\n"
        f"    job = ContainerJob.start(('sleep', '60'), spec=ContainerSpec(image={IMAGE!r}), find_orphans=tuple,\n"
        f"        locks=LockDirectory(Path({str(locks.path)!r}), system=False))\n"
        "except ThorSpecError as error:\n    sys.exit(error.exit_code)\n"
        "print('won', flush=True)\nsys.stdin.read()\njob.kill()\njob.close()\n"
    )
    launchers = [
        subprocess.Popen([sys.executable, "-c", body], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)
    ]
    for launcher in launchers:
        assert launcher.stdin
        launcher.stdin.write(b"g")
        launcher.stdin.flush()
    until(lambda: sum(launcher.poll() is not None for launcher in launchers) == 2)
    [winner] = [launcher for launcher in launchers if launcher.returncode is None]
    assert winner.stdout
    assert winner.stdout.readline() == b"won\n"
    assert [launcher.returncode for launcher in launchers if launcher is not winner] == [10, 10]
    assert len(docker.calls("create")) == 1
    assert len(docker.calls("ps")) == 1
    winner.communicate(timeout=20)
    assert winner.returncode == 0
    assert docker.containers() == []


def test_a_host_job_and_a_container_exclude_each_other(
    contain: Contain, start: Start, docker: Docker, locks: LockDirectory
) -> None:
    with start(("sleep", "60")):
        with pytest.raises(BusyError):
            contain(("true",))
        assert docker.calls() == []
    contain(("sleep", "60"))
    with pytest.raises(BusyError):
        start(("true",))


def test_row05_an_engine_orphan_refuses_a_container(
    contain: Contain, docker: Docker, bystander: Callable[..., "subprocess.Popen[bytes]"], locks: LockDirectory
) -> None:
    orphan = bystander("VLLM::EngineCore")
    with pytest.raises(OrphanError, match=rf"pid {orphan.pid} \(VLLM::EngineCore\)") as caught:
        contain(("true",), find_orphans=orphans.find)
    assert caught.value.exit_code == 11
    assert docker.calls("create") == []
    assert not status(locks).held


def test_row07_a_container_stuck_in_created_refuses_the_start(
    contain: Contain, start: Start, docker: Docker, locks: LockDirectory
) -> None:
    left = docker.leave(locks, job=SOME_JOB)
    with pytest.raises(OrphanError, match=rf"container {left[:12]} \(.*created.*reap --yes") as caught:
        contain(("true",))
    assert caught.value.exit_code == 11
    with pytest.raises(OrphanError, match=left[:12]):
        start(("true",), find_orphans=orphans.find)  # a host job as well
    assert not status(locks).held


def test_row07_a_start_that_fails_leaves_no_container(contain: Contain, docker: Docker, locks: LockDirectory) -> None:
    docker.fault("start", "fail")
    with pytest.raises(PlatformError, match="start failed as told"):
        contain(("true",))
    assert docker.containers() == []
    assert not status(locks).held


def test_row07_what_cannot_be_removed_is_said(contain: Contain, docker: Docker) -> None:
    docker.fault("start", "fail")
    docker.fault("rm", "refuse")
    with pytest.raises(PlatformError) as caught:
        contain(("true",))
    assert "could not be removed" in caught.value.__notes__[0]
    with pytest.raises(OrphanError):
        contain(("true",))


def test_a_container_that_does_not_lock_is_ended(
    contain: Contain, docker: Docker, engine: Engine, locks: LockDirectory
) -> None:
    for fault in ("bare", "elsewhere"):
        docker.fault("start", fault)
        with pytest.raises(LockPathError, match="does not hold the residency lock"):
            contain(engine.argv("pass"), confirm_s=0.4)
        assert docker.containers() == []
        assert not status(locks).held
    assert not any(map(alive, engine.pids()))


def test_the_lock_taken_by_another_in_between(contain: Contain, docker: Docker, locks: LockDirectory) -> None:
    locks.take(ADMISSION).release()
    docker.fault("start", "slow")

    def steal() -> tuple[()]:
        # After the launcher's probe: something that does not ask for admission, such as a container started by hand.
        thieves.append(locks.take(RESIDENCY))
        return ()

    thieves: list[object] = []
    with pytest.raises(BusyError, match="took the device while"):
        contain(("sleep", "60"), find_orphans=steal)
    assert docker.containers() == []
    thieves[0].release()  # type: ignore[attr-defined]


def test_the_grace_is_given_and_can_be_skipped(contain: Contain, engine: Engine, tmp_path: Path) -> None:
    body = f"signal.signal(15, lambda *_: (time.sleep(0.3), open({str(tmp_path / 'saved')!r}, 'w'), sys.exit(0)))"
    job = contain(engine.argv(body))
    engine.pid("first")
    assert job.stop() == 0
    assert (tmp_path / "saved").exists()
    job.close()
    job = contain((*PYTHON, "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"), grace_s=60)
    assert job.stop(skip_grace=lambda: True) == 137


def test_a_survivor_keeps_the_locks(
    contain: Contain, docker: Docker, locks: LockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = contain(("sleep", "60"))
    with monkeypatch.context() as patch:
        patch.setattr(ContainerJob, "_request", lambda *_: None)
        patch.setattr(ContainerJob, "_is_seen_alive", lambda _: True)
        job.members.cgroup = None
        with pytest.raises(StuckInKernelError, match=r"container .*reboot"):
            job.stop(grace_s=0.05, kill_wait_s=0.1)
        job.close()
    assert (status(locks).admission_held, status(locks).residency_held) == (True, True)


def test_a_container_removed_by_somebody_else_has_ended(contain: Contain, docker: Docker) -> None:
    job = contain(("sleep", "60"))
    docker.runtime.remove(job.container.id)
    assert job.wait(10) == 137
    job.close()


def test_what_cannot_be_removed_at_the_end_is_an_error(contain: Contain, docker: Docker, locks: LockDirectory) -> None:
    docker.fault("rm", "refuse")
    with pytest.raises(ContainerRuntimeError, match=r"cannot be removed.*reap --yes"), contain(("true",)) as job:
        job.wait(10)
    assert not status(locks).held


def test_the_surface_is_that_of_a_host_job() -> None:
    for name in ("start", "poll", "wait", "stop", "kill", "pids", "note", "close", "pid", "__enter__", "__exit__"):
        assert hasattr(ContainerJob, name) == hasattr(Job, name) is True
