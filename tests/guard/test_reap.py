"""What jobs left behind is ended on request, and nobody else is ever signalled."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from thor_spec.errors import BusyError, ConfigError, ContainerRuntimeError, OrphanError
from thor_spec.guard import cgroup, identity, marker, orphans, processes
from thor_spec.guard.locks import LockDirectory
from thor_spec.guard.reap import Scope, find, job_cgroups, reap
from thor_spec.guard.status import status

from .conftest import Bystander, Engine, Launcher, Start
from .docker_stand_in import Contain, Docker
from .guarding import ESCAPED
from .waiting import PYTHON, alive, until

Launch = Callable[..., Launcher]
JOB = "0b6c1c9e-59e0-4e2b-8f39-4b9c5a4a1c11"
OTHER = "7d3f6a52-0c7e-4e0b-9d8b-2f1d5b6f7a90"


@pytest.fixture
def scope(locks: LockDirectory, docker: Docker) -> Scope:
    return Scope(locks=locks, runtime=docker.runtime)


@pytest.fixture
def leftover(locks: LockDirectory) -> Iterator[Callable[..., int]]:
    """Start processes that carry the mark of a job nobody supervises."""
    started: list[subprocess.Popen[bytes]] = []

    def leftover(job: str = JOB, body: str = "pass", **variables: str) -> int:
        environment = {**os.environ, **marker.environment(job, locks.path), **variables}
        code = f"import signal, time\n{body}\nprint(1, flush=True)\ntime.sleep(60)"
        started.append(subprocess.Popen([*PYTHON, code], env=environment, stdout=subprocess.PIPE))
        stdout = started[-1].stdout
        assert stdout
        stdout.readline()
        return started[-1].pid

    yield leftover
    for process in started:
        process.kill()
        process.communicate()


def abandon(launch: Launch, engine: Engine) -> list[int]:
    """Kill launcher and shim, so that a deaf process outside their session is left; return its pid."""
    launcher = launch(engine.argv("pass", ESCAPED), grace_s=60)
    shim = launcher.hear()["shim"]
    pids = [engine.pid("first"), engine.pid("child1")]
    os.kill(shim, signal.SIGSTOP)  # or it would end the job in time
    launcher.kill()
    os.kill(shim, signal.SIGKILL)
    until(lambda: not alive(pids[0]))
    return pids[1:]


def test_row03_what_launcher_and_shim_left_refuses_starts_until_it_is_reaped(
    launch: Launch, start: Start, engine: Engine, scope: Scope
) -> None:
    [left] = abandon(launch, engine)
    until(lambda: not status(scope.locks).held)
    with pytest.raises(OrphanError, match=rf"pid {left} \(.*left over from job .*reap --yes"):
        start(("true",), find_orphans=None)
    assert [one.pid for one in find(scope)] == [left]
    assert alive(left)
    done = reap(scope, grace_s=0.1)
    assert ([one.pid for one in done.ended], done.left) == ([left], ())
    assert not alive(left)
    assert find(scope) == ()
    assert left not in {orphan.pid for orphan in orphans.find(scope.locks.path)}
    assert start(("true",)).wait(10) == 0


def test_row05_an_engine_without_a_mark_is_reported_and_never_signalled(
    bystander: Bystander, scope: Scope, start: Start
) -> None:
    orphan = bystander("VLLM::EngineCore")
    with pytest.raises(OrphanError, match=rf"pid {orphan.pid} \(VLLM::EngineCore\)"):
        start(("true",), find_orphans=None)
    assert find(scope) == ()
    assert reap(scope, grace_s=0.1) == reap(scope, grace_s=0)
    assert alive(orphan.pid)


def test_bystanders_are_never_signalled(
    bystander: Bystander,
    leftover: Callable[..., int],
    scope: Scope,
    docker: Docker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = marker.environment(JOB, scope.locks.path)
    bystander("VLLM::EngineCore")
    bystander("VLLM::EngineCore", *(f"{name}={value}" for name, value in mark.items()))
    bystander("python", "-m", "thor_spec.guard.shim", "--lock-fd", "3")
    for changed in (
        {"THOR_SPEC_JOB": "not-a-uuid"},
        {"THOR_SPEC_JOB": JOB.upper()},
        {"THOR_SPEC_LOCKS": str(tmp_path / "other")},
        {"THOR_SPEC_LOCKS": str(scope.locks.path) + "2"},
    ):
        for name, value in {**mark, **changed}.items():
            monkeypatch.setenv(name, value)
        bystander("VLLM::EngineCore")
    for name in mark:
        monkeypatch.delenv(name)
    foreign = [
        docker.leave(scope.locks, job=OTHER, locks="/run/lock/other"),
        docker.leave(replace(scope.locks, path=tmp_path / "other"), job=OTHER),
    ]
    unlabelled = docker.leave(scope.locks, job=OTHER)
    path = docker.state / f"{unlabelled}.json"
    labels = '"Labels": {"thor-spec.jobs": "x", "my.thor-spec.job": "y"}'
    described = json.loads(path.read_text())
    described["Config"]["Labels"] = json.loads("{" + labels + "}")["Labels"]
    path.write_text(json.dumps(described))
    ours = leftover()
    mine = docker.leave(scope.locks, job=JOB)
    assert [(one.pid, mine[:12] in one.what) for one in find(scope)] == [(0, True), (ours, False)]
    assert reap(scope, grace_s=0.1).left == ()
    assert not alive(ours)
    assert {made["Id"] for made in docker.containers()} == {*foreign, unlabelled}
    # the fixture checks that no bystander was signalled


def test_neither_the_caller_nor_those_above_it_are_left_over(scope: Scope, tmp_path: Path, docker: Docker) -> None:
    # A shell inside a job that calls reap: its whole chain carries the mark.
    environment = {**os.environ, **marker.environment(JOB, tmp_path / "runtime" / "locks")}
    environment["THOR_SPEC_RUNTIME_DIR"] = str(tmp_path / "runtime")
    command = f"{sys.executable} -m thor_spec reap --yes --grace 0; echo code $?"
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=30)
    assert done.stdout == "nothing left\ncode 0\n"


def test_a_living_job_is_spared(launch: Launch, engine: Engine, scope: Scope, leftover: Callable[..., int]) -> None:
    launch(engine.argv("pass")).hear()
    first = engine.pid("first")
    other = leftover(OTHER)
    assert [one.pid for one in find(scope)] == [other]
    with pytest.raises(BusyError):
        reap(scope, grace_s=0)
    assert alive(first)
    assert alive(other)


def test_a_job_that_its_shim_is_stopping_can_be_hurried(launch: Launch, engine: Engine, scope: Scope) -> None:
    launcher = launch(engine.argv("ignore()", ESCAPED), grace_s=60)
    launcher.hear()
    pids = [engine.pid("first"), engine.pid("child1")]
    launcher.kill()
    assert reap(scope, grace_s=0.1).left == ()
    assert not any(map(alive, pids))
    assert not status(scope.locks).held


def test_the_grace_is_given_and_each_is_asked_once(leftover: Callable[..., int], scope: Scope, tmp_path: Path) -> None:
    count = tmp_path / "count"
    body = (
        f"def saved(*_):\n    open({str(count)!r}, 'a').write('x')\n    time.sleep(0.2)\n    raise SystemExit\n"
        "signal.signal(signal.SIGTERM, saved)"
    )
    pid = leftover(body=body)
    assert reap(scope, grace_s=10).left == ()
    assert count.read_text() == "x"
    assert not alive(pid)


def test_what_a_shim_asks_is_not_asked_again(launch: Launch, engine: Engine, scope: Scope, tmp_path: Path) -> None:
    count = tmp_path / "count"
    body = f"signal.signal(15, lambda *_: (open({str(count)!r}, 'a').write('x'), time.sleep(0.5), os._exit(0)))"
    launcher = launch(engine.argv(body), grace_s=60)
    launcher.hear()
    first = engine.pid("first")
    launcher.kill()  # the shim asks the engine to stop
    assert reap(scope, grace_s=10).left == ()
    assert count.read_text() == "x"
    assert not alive(first)


def test_the_grace_can_be_skipped(leftover: Callable[..., int], scope: Scope) -> None:
    pid = leftover(body="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    reap(scope, grace_s=60, skip_grace=lambda: True)
    assert not alive(pid)


def test_row10_a_reused_pid_is_not_signalled(
    bystander: Bystander, scope: Scope, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = processes.read(bystander().pid)
    assert process is not None
    earlier = process._replace(start_ticks=process.start_ticks - 1)
    monkeypatch.setattr(Scope, "processes", lambda _: [earlier] if processes.is_same(process) else [])
    assert [one.pid for one in reap(scope, grace_s=0, kill_wait_s=0.2).left] == [process.pid]


def test_a_title_that_overwrites_the_environment_keeps_the_mark(leftover: Callable[..., int], scope: Scope) -> None:
    pytest.importorskip("setproctitle")
    import setproctitle

    site = str(Path(setproctitle.__file__).parent.parent)
    body = f"import sys; sys.path.append({site!r})\nimport setproctitle; setproctitle.setproctitle('VLLM::EngineCore')"
    pid = leftover(body=body)
    assert processes.arguments(pid)[0] == "VLLM::EngineCore"
    assert [one.pid for one in find(scope)] == [pid]
    assert [one.what for one in find(scope)] == ["VLLM::EngineCore"]


def test_own_is_what_this_run_of_the_unit_started(
    leftover: Callable[..., int], docker: Docker, locks: LockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INVOCATION_ID", raising=False)
    with pytest.raises(ConfigError, match="systemd unit"):
        Scope.of_unit(locks)
    mine = leftover(INVOCATION_ID="a" * 32)
    other = leftover(OTHER, INVOCATION_ID="b" * 32)
    ours = docker.leave(locks, job=JOB, invocation="a" * 32)
    theirs = docker.leave(locks, job=OTHER)
    monkeypatch.setenv("INVOCATION_ID", "a" * 32)
    own = Scope.of_unit(locks, runtime=docker.runtime)
    assert {one.pid for one in find(own)} == {0, mine}
    held = locks.take("admission")  # somebody else's launcher has been faster than we
    done = reap(own, grace_s=0.1)
    held.release()
    assert {(one.pid, one.job) for one in done.ended} == {(0, JOB), (mine, JOB)}
    assert alive(other)
    assert [made["Id"] for made in docker.containers()] == [theirs]
    assert ours != theirs


def test_a_job_in_a_container_carries_the_units_run(
    contain: Contain, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INVOCATION_ID", "c" * 32)
    contain(("sleep", "60"))
    assert docker.runtime.containers()[0].invocation == "c" * 32


@pytest.fixture
def cgroup_of() -> Iterator[Callable[[str], tuple[Path, int]]]:
    """Make control groups named like a job's, each with a process that carries no mark; return its pid too."""
    made: list[tuple[Path, subprocess.Popen[bytes]]] = []

    def cgroup_of(job: str) -> tuple[Path, int]:
        group = Path(cgroup.mount_point() or "/proc") / f"{cgroup.PREFIX}{job}"
        try:
            group.mkdir()
        except OSError:
            pytest.skip("not run: cgroup v2 cannot be written here")
        made.append((group, subprocess.Popen([*PYTHON, "import time; time.sleep(60)"])))
        (group / "cgroup.procs").write_text(str(made[-1][1].pid))
        return group, made[-1][1].pid

    yield cgroup_of
    for group, process in made:
        process.kill()
        process.wait()
        group.rmdir()


def test_who_is_in_a_job_cgroup_is_left_over(
    scope: Scope, bystander: Bystander, cgroup_of: Callable[[str], tuple[Path, int]]
) -> None:
    ours, theirs = str(uuid.uuid4()), str(uuid.uuid4())
    bystander("VLLM::EngineCore")
    group, inside = cgroup_of(ours)
    _, stranger = cgroup_of(theirs)
    assert job_cgroups(scope.locks) == ()  # nothing says that they belong to these locks
    scope.locks.take("residency", identity.of_process(inside, uuid=ours)).close()
    assert job_cgroups(scope.locks) == (str(group),)
    with_group = replace(scope, cgroups=job_cgroups(scope.locks))
    assert [one.pid for one in find(with_group)] == [inside]
    held = scope.locks.take("admission", identity.of_process(os.getpid(), uuid=ours))
    assert find(with_group) == ()  # its launcher lives
    held.release()
    assert reap(with_group, grace_s=1).left == ()
    assert not alive(inside)
    assert alive(stranger)


@pytest.mark.parametrize("state", ["created", "exited", "dead", "paused"])
def test_row07_a_container_in_any_state_is_removed(scope: Scope, docker: Docker, state: str) -> None:
    left = docker.leave(scope.locks, job=JOB, state=state)
    [listed] = find(scope)
    assert left[:12] in listed.describe()
    assert state in listed.describe()
    assert docker.calls("rm") == []
    assert reap(scope, grace_s=0).left == ()
    assert docker.containers() == []
    assert ["rm", "--force", left] in docker.calls("rm")


@pytest.mark.parametrize("fault", ["refuse", "hang"])
def test_row07_a_container_that_cannot_be_removed_is_left(scope: Scope, docker: Docker, fault: str) -> None:
    docker.leave(scope.locks, job=JOB)
    docker.fault("rm", fault)
    impatient = docker.impatient(change_s=0.3)
    if fault == "refuse":
        impatient = docker.runtime
    done = reap(replace(scope, runtime=impatient), grace_s=0)
    assert ([one.job for one in done.left], done.ended) == ([JOB], ())
    for client in impatient.left_behind:
        assert client.poll() is None  # bounded, and not killed
        client.kill()
        client.wait()
    assert len(impatient.left_behind) == (2 if fault == "hang" else 0)


def test_row06_a_running_container_whose_launcher_is_gone_is_ended(
    contain: Contain, docker: Docker, engine: Engine, scope: Scope
) -> None:
    job = contain(engine.argv("pass", ESCAPED))
    pids = [engine.pid("first"), engine.pid("child1")]
    assert find(scope) == ()  # its launcher lives
    job._admission.close()
    listed = find(scope)
    assert [one.pid for one in listed] == [0, *sorted(pids)]
    assert reap(scope, grace_s=5).left == ()
    assert not any(map(alive, pids))
    assert docker.containers() == []
    assert [call[2] for call in docker.calls("kill")][:1] == ["TERM"]
    job._removed = True


def test_row08_a_hanging_daemon_is_reported_after_the_processes_were_ended(
    leftover: Callable[..., int], scope: Scope, docker: Docker
) -> None:
    pid = leftover()
    docker.fault("ps", "hang")
    with pytest.raises(ContainerRuntimeError) as caught:
        reap(replace(scope, runtime=docker.impatient(answer_s=0.3)), grace_s=1)
    assert caught.value.exit_code == 42
    assert not alive(pid)


def test_row09_a_job_whose_lock_file_was_deleted_can_be_reaped(launch: Launch, engine: Engine, scope: Scope) -> None:
    launcher = launch(engine.argv("pass"))
    shim = launcher.hear()["shim"]
    first = engine.pid("first")
    (scope.locks.path / "residency").unlink()
    assert {shim, first} <= {orphan.pid for orphan in orphans.find(scope.locks.path)}
    assert {one.pid for one in find(scope)} == {shim, first}
    assert reap(scope, grace_s=5).left == ()
    assert not alive(first)


def test_row30_a_container_from_an_earlier_boot_is_reaped(scope: Scope, docker: Docker) -> None:
    docker.leave(scope.locks, job=JOB, state="exited", boot="11111111-2222-3333-4444-555555555555")
    assert [one.job for one in find(scope)] == [JOB]
    assert reap(scope, grace_s=0).left == ()


def test_the_command_and_its_exit_codes(docker: Docker, locks: LockDirectory) -> None:
    environment = {**os.environ, "THOR_SPEC_RUNTIME_DIR": str(locks.path.parent)}

    def call(*options: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "thor_spec", "reap", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        return done.returncode, done.stdout, done.stderr

    assert call() == (0, "nothing left\n", "")
    left = docker.leave(locks, job=JOB)
    code, out, _ = call()
    assert (code, out.startswith(f"left  container {left[:12]}")) == (11, True)
    docker.fault("rm", "refuse")
    code, _, err = call("--yes", "--grace", "0")
    assert code == 40
    assert f"Could not be ended or removed: container {left[:12]}" in err
    assert err.count("\n") <= 2
    docker.fault("rm", None)
    code, out, _ = call("--yes", "--json")
    assert (code, [one["job"] for one in json.loads(out)["ended"]]) == (0, [JOB])
    assert call("--own")[0] == (2 if "INVOCATION_ID" not in os.environ else 0)
