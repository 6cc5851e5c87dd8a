"""The container runtime: its program, its daemon, and clients whose death or silence does not matter."""

import os
import signal
import time
from pathlib import Path

import pytest

from thor_spec.errors import (
    ContainerRuntimeError,
    OrphanError,
    PlatformError,
)
from thor_spec.guard import container_runtime, orphans, processes
from thor_spec.guard.container_runtime import ContainerRuntime, NoAnswerError
from thor_spec.guard.locks import LockDirectory
from thor_spec.guard.status import status

from .conftest import Engine, Start
from .docker_stand_in import IMAGE, SOME_JOB, Contain, Docker, log_client
from .waiting import alive, until


def test_row06_a_dead_docker_client_does_not_touch_the_container(
    contain: Contain, docker: Docker, engine: Engine, tmp_path: Path
) -> None:
    body = "signal.signal(10, lambda *_: print('second', flush=True)); print('first', flush=True)"
    job = contain(engine.argv(body), output=tmp_path / "log")
    until(lambda: "first" in (tmp_path / "log").read_text())
    client = log_client()
    os.kill(client, signal.SIGKILL)
    until(lambda: job.poll() is None and len(docker.calls("logs")) == 2)
    assert alive(engine.pid("first"))

    def heard() -> bool:
        os.kill(engine.pid("first"), signal.SIGUSR1)
        return job.poll() is None and "second" in (tmp_path / "log").read_text()

    until(heard)


@pytest.mark.parametrize("verb", ["create", "start"])
def test_row06_a_client_that_dies_half_way_is_looked_up_by_label(contain: Contain, docker: Docker, verb: str) -> None:
    docker.fault(verb, "die-after")
    job = contain(("sleep", "60"))
    assert [made["Id"] for made in docker.containers()] == [job.container.id]
    assert job.poll() is None


def test_row08_a_hanging_daemon_refuses_a_start(contain: Contain, docker: Docker, locks: LockDirectory) -> None:
    assert container_runtime.ANSWER_S == 20
    docker.fault("ps", "hang")
    begun = time.monotonic()
    with pytest.raises(ContainerRuntimeError, match=r"ps has not answered within 0\.3 s") as caught:
        contain(("true",), runtime=docker.impatient(answer_s=0.3))
    assert time.monotonic() - begun < 3
    assert caught.value.exit_code == 42
    assert not status(locks).held


def test_row08_a_hanging_daemon_refuses_a_host_job_too(
    start: Start, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker.fault("ps", "hang")
    monkeypatch.setattr(ContainerRuntime, "find", lambda: docker.impatient(answer_s=0.3))
    with pytest.raises(NoAnswerError):
        start(("true",), find_orphans=orphans.find)


def test_row08_a_client_that_hangs_in_create_is_left_alone(
    contain: Contain, docker: Docker, locks: LockDirectory
) -> None:
    docker.fault("create", "hang-after")
    impatient = docker.impatient(change_s=0.3)
    with pytest.raises(ContainerRuntimeError, match=r"create has not answered.*is left to end by itself"):
        contain(("true",), runtime=impatient)
    [client] = impatient.left_behind
    assert client.poll() is None
    assert docker.calls("rm") == []
    assert not status(locks).held
    docker.fault("create", None)
    until(docker.containers)  # the daemon got there after all
    with pytest.raises(OrphanError, match="created"):
        contain(("true",))
    client.kill()
    client.wait()


@pytest.mark.parametrize("way", ["control group", "first process"])
def test_row08_a_running_job_is_stopped_without_the_daemon(
    contain: Contain, docker: Docker, engine: Engine, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    job = contain(engine.argv("ignore()", "os.setsid(); ignore()"))
    if way == "first process":
        job.members.cgroup = None
    elif job.members.cgroup is None:
        pytest.skip("not run: cgroup v2 cannot be written here")
    job._runtime = docker.impatient(answer_s=0.3)
    pids = [engine.pid("first"), engine.pid("child1")]
    for verb in ("kill", "inspect", "ps"):
        docker.fault(verb, "hang")
    begun = time.monotonic()
    with monkeypatch.context() as patch:
        if way == "control group":
            patch.setattr(processes, "send", lambda *_: False)
        assert job.stop(grace_s=0.1, kill_wait_s=5) == 137
    assert time.monotonic() - begun < 5
    until(lambda: not any(map(alive, pids)))  # without a control group, the fake ends the others a moment later


def test_row08_a_daemon_that_hangs_right_after_the_start_leaves_no_engine(
    contain: Contain, docker: Docker, engine: Engine, locks: LockDirectory
) -> None:
    docker.fault("inspect", "hang")
    with pytest.raises(ContainerRuntimeError, match="inspect has not answered") as caught:
        contain(engine.argv("ignore()"), runtime=docker.impatient(answer_s=1.0))
    assert caught.value.exit_code == 42
    until(lambda: not any(map(alive, engine.pids())))
    until(lambda: not status(locks).held)
    docker.fault("inspect", None)
    with pytest.raises(OrphanError, match="exited"):
        contain(("true",))


def test_no_image_no_runtime(contain: Contain, docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    (docker.state / "no-image").touch()
    with pytest.raises(PlatformError, match=rf"docker pull {IMAGE}"):
        contain(("true",))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PlatformError, match="Neither docker nor podman"):
        contain(("true",), runtime=None)


def test_podman_is_taken_where_there_is_no_docker(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(docker.bin))
    assert ContainerRuntime.find().name == "docker"
    (docker.bin / "docker").rename(docker.bin / "podman")
    assert ContainerRuntime.find().name == "podman"


def test_clients_carry_no_mark(contain: Contain, docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THOR_SPEC_JOB", SOME_JOB)
    contain(("sleep", "60"))
    client = log_client()
    assert b"THOR_SPEC_JOB" not in Path(f"/proc/{client}/environ").read_bytes()
