"""A job in a container: one holder, one lock, and no client or daemon whose death matters."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from thor_spec.errors import (
    BusyError,
    ConfigError,
    ContainerRuntimeError,
    LockPathError,
    OrphanError,
    PlatformError,
    StuckInKernelError,
)
from thor_spec.guard import cgroup, container_runtime, orphans, processes
from thor_spec.guard.container_runtime import ContainerRuntime, NoAnswerError
from thor_spec.guard.container_spec import ContainerSpec, Mount
from thor_spec.guard.containers import ContainerJob
from thor_spec.guard.job import Job
from thor_spec.guard.locks import ADMISSION, RESIDENCY, LockDirectory
from thor_spec.guard.reap import Scope, reap
from thor_spec.guard.status import status, stop

from .conftest import Engine
from .docker_stand_in import IMAGE, SPEC, Docker
from .waiting import PYTHON, alive, until

Contain = Callable[..., ContainerJob]
Start = Callable[..., Job]
SOME_JOB = "0b6c1c9e-59e0-4e2b-8f39-4b9c5a4a1c11"


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


def test_labels_and_options(contain: Contain, docker: Docker, locks: LockDirectory, tmp_path: Path) -> None:
    spec = replace(SPEC, mounts=(Mount(tmp_path), Mount(tmp_path / "docker", writable=True)))
    job = contain(("sleep", "60"), spec=spec, env={"VLLM_PLUGINS": "thor_spec"})
    [call] = docker.calls("create")
    text = " ".join(call)
    assert f"--label thor-spec.job={job.identity.uuid}" in text
    assert f"--label thor-spec.boot={processes.boot_id()}" in text
    assert f"--label thor-spec.locks={locks.path}" in text
    assert "--runtime nvidia" in text
    assert "--network host" in text
    assert "--ipc host" in text
    assert "--env VLLM_PLUGINS=thor_spec" in text
    assert f"type=bind,source={locks.path / RESIDENCY},target=/run/thor-spec/residency,readonly" in text
    assert f"type=bind,source={tmp_path},target={tmp_path},readonly" in text
    assert call[call.index(IMAGE) - 2 : call.index(IMAGE)] == ["--entrypoint", "python3"]
    mounts = [part for part in call if part.startswith("type=bind")]
    assert [part for part in mounts if not part.endswith(",readonly")] == [
        f"type=bind,source={tmp_path / 'docker'},target={tmp_path / 'docker'}"
    ]
    assert not {part.partition("=")[0] for part in call} & {
        "--restart",
        "--pid",
        "--privileged",
        "--rm",
        "-v",
        "--gpus",
    }


def test_the_options_exist_in_docker_itself(tmp_path: Path) -> None:
    program = next(
        (found for found in ("/usr/local/bin/docker", "/usr/bin/docker", "/usr/bin/podman") if os.path.exists(found)),
        None,
    )
    if program is None:
        pytest.skip("not run: neither docker nor podman is installed")
    spec = ContainerSpec(image=IMAGE, mounts=(Mount(tmp_path),), shm_bytes=1 << 30)
    arguments = spec.create_arguments(
        ("x",), labels={"a": "b"}, env={"a": "b"}, name="n", lock_file=tmp_path, group=1, workdir=tmp_path
    )
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20)
    assert "unknown flag" not in done.stderr
    assert "invalid argument" not in done.stderr


@pytest.mark.parametrize("image", ["vllm/vllm-openai", "vllm/vllm-openai:latest", "vllm@sha256:abc", f"{IMAGE} -v /:/"])
def test_a_floating_image_is_refused(image: str) -> None:
    with pytest.raises(PlatformError, match=r"not named by digest.*@sha256"):
        ContainerSpec(image=image)


def test_specifications_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ContainerSpec(image=IMAGE, mounts=(Mount(tmp_path / "absent"),))
    with pytest.raises(ConfigError, match="without a comma"):
        ContainerSpec(image=IMAGE, mounts=(Mount(Path("/a,b")),))
    assert "17 GiB" in ContainerSpec(image=IMAGE, shm_bytes=17 << 30).warnings()[0]
    assert not ContainerSpec(image=IMAGE, shm_bytes=16 << 30).warnings()
    arguments = ContainerSpec(image=IMAGE, shm_bytes=8 << 30, gpu_runtime=None).create_arguments(
        (), labels={}, env={}, name="n", lock_file=tmp_path
    )
    assert "--ipc" not in arguments
    assert "--runtime" not in arguments
    assert arguments[arguments.index("--shm-size") + 1] == str(8 << 30)


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


def log_client() -> int:
    """Return the pid of the client that follows the log; while it execs, its arguments cannot be read."""

    def found() -> list[int]:
        return [p.pid for p in processes.descendants(os.getpid()) if "logs" in processes.arguments(p.pid)]

    return int(until(found)[0])


@pytest.mark.parametrize("verb", ["create", "start"])
def test_row06_a_client_that_dies_half_way_is_looked_up_by_label(contain: Contain, docker: Docker, verb: str) -> None:
    docker.fault(verb, "die-after")
    job = contain(("sleep", "60"))
    assert [made["Id"] for made in docker.containers()] == [job.container.id]
    assert job.poll() is None


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


def test_clients_carry_no_mark(contain: Contain, docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THOR_SPEC_JOB", SOME_JOB)
    contain(("sleep", "60"))
    client = log_client()
    assert b"THOR_SPEC_JOB" not in Path(f"/proc/{client}/environ").read_bytes()


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


def test_the_surface_is_that_of_a_host_job() -> None:
    for name in ("start", "poll", "wait", "stop", "kill", "pids", "note", "close", "pid", "__enter__", "__exit__"):
        assert hasattr(ContainerJob, name) == hasattr(Job, name) is True


def command(docker: Docker, locks: LockDirectory, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "THOR_SPEC_RUNTIME_DIR": str(locks.path.parent)}
    call = [sys.executable, "-m", "thor_spec", *arguments]
    return subprocess.run(call, env=environment, capture_output=True, text=True, timeout=60)


def test_the_command_line_runs_a_container(docker: Docker, locks: LockDirectory, tmp_path: Path) -> None:
    options = ("--container", IMAGE, "--mount", str(tmp_path), "--shm-size", str(20 << 30))
    done = command(docker, locks, "run", *options, "--", "sh", "-c", "echo $0; exit 7", "x")
    assert (done.returncode, done.stdout) == (7, "x\n"), done.stderr
    assert "Shared memory of 20 GiB" in done.stderr
    assert docker.containers() == []


def test_the_command_line_says_what_could_not_be_removed(docker: Docker, locks: LockDirectory) -> None:
    docker.fault("start", "fail")
    docker.fault("rm", "refuse")
    done = command(docker, locks, "run", "--container", IMAGE, "--", "true")
    assert done.returncode == 13
    assert "could not be removed. Run `thor-spec reap --yes`" in done.stderr
    assert done.stderr.count("\n") <= 2


def test_ctrl_c_stops_the_container(docker: Docker, locks: LockDirectory, engine: Engine) -> None:
    environment = {**os.environ, "THOR_SPEC_RUNTIME_DIR": str(locks.path.parent)}
    call = [sys.executable, "-m", "thor_spec", "run", "--container", IMAGE, "--", *engine.argv("pass")]
    with subprocess.Popen(call, env=environment) as launcher:
        first = engine.pid("first")
        until(lambda: status(locks).holder and status(locks).holder.container)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(20) == 0
    assert not alive(first)
    assert docker.containers() == []
    assert [call[2] for call in docker.calls("kill")] == ["TERM"]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/system.slice/docker-ID.scope", "system.slice/docker-ID.scope"),
        ("/machine.slice/libpod-ID.scope/container", "machine.slice/libpod-ID.scope"),
        ("/docker/ID/init", "docker/ID"),
        ("/system.slice/ssh.service", None),
        ("/", None),
        ("", None),
        ("/x/../docker-ID.scope", None),
    ],
)
def test_a_control_group_is_ours_only_by_the_containers_id(
    monkeypatch: pytest.MonkeyPatch, path: str, found: str | None
) -> None:
    monkeypatch.setattr(cgroup, "of_process", lambda _: f"/nowhere{path.replace('ID', 'a' * 64)}")
    expected = f"/nowhere/{found.replace('ID', 'a' * 64)}" if found else None
    assert cgroup.of_container(1, "a" * 64) == expected
    assert cgroup.of_container(1, "b" * 64) is None
    assert cgroup.of_container(1, "a") is None
    assert (cgroup.kill("/nowhere"), cgroup.is_populated("/nowhere"), cgroup.pids("/nowhere")) == (False, False, ())
