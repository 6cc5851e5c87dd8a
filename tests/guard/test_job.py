"""One job: started by one launcher only, and gone to the last process before the next one may start."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from thor_spec.errors import BusyError, LockPathError, StuckInKernelError
from thor_spec.guard import cgroup, identity, processes
from thor_spec.guard.job import Job
from thor_spec.guard.locks import ADMISSION, RESIDENCY, LockDirectory
from thor_spec.guard.status import status

from .conftest import Bystander, Engine, Launcher, Start
from .guarding import ESCAPED, is_free
from .waiting import PYTHON, alive, until

Launch = Callable[..., Launcher]


def test_of_twenty_starts_at_once_one_wins(launch: Launch, engine: Engine) -> None:
    gate, open_gate = os.pipe()
    launchers = [launch(engine.argv("pass"), gate=gate) for _ in range(20)]
    os.close(gate)
    os.close(open_gate)
    answers = [launcher.hear() for launcher in launchers]
    won = [index for index, answer in enumerate(answers) if answer["code"] == 0]
    lost = [answer for answer in answers if answer["code"] == 10]
    assert (len(won), len(lost)) == (1, 19)
    assert all(answer["after_s"] < 2 for answer in lost)
    assert all(f"pid {launchers[won[0]].pid} (" in answer["text"] for answer in lost)
    assert engine.pid("first")
    assert len(engine.pids()) == 1


def test_output_exit_status_and_release(start: Start, locks: LockDirectory, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start((*PYTHON, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"), output=log) as job:
        assert job.wait(10) == 7
    assert sorted(log.read_text().split()) == ["err", "out"]
    assert not status(locks).held
    with start(("true",), output=subprocess.PIPE) as job:
        assert job.wait(10) == 0


@pytest.mark.parametrize(("argv", "code"), [(("/no/such/engine",), 127), (("/etc/passwd",), 126)])
def test_a_command_that_cannot_run_says_so(start: Start, tmp_path: Path, argv: tuple[str, ...], code: int) -> None:
    job = start(argv, output=tmp_path / "log")
    assert job.wait(10) == code
    assert f"cannot run {argv[0]}" in (tmp_path / "log").read_text()


def test_the_command_gets_a_clean_start(start: Start, tmp_path: Path) -> None:
    body = (
        "import os, signal\n"
        "def target(n):\n"
        "    try: return os.readlink(f'/proc/self/fd/{n}')\n"
        "    except OSError: return None\n"  # the listing itself has a descriptor, closed by now
        "print([target(n) for n in os.listdir('/proc/self/fd') if int(n) > 2 and target(n)])\n"
        "print([s.name for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())])\n"
        "print(os.getpgid(0) == os.getpid(), os.readlink('/proc/self/fd/0'))\n"
        "print(open('/proc/self/status').read().split('SigIgn:')[1].split()[0])\n"
    )
    # Without -I the interpreter would be the same; SIGPIPE and SIGXFSZ are its own doing.
    job = start((*PYTHON, body), output=tmp_path / "log")
    assert job.wait(10) == 0
    fds, mask, rest, ignored = (tmp_path / "log").read_text().splitlines()
    assert (fds, mask, rest) == ("[]", "[]", "True /dev/null")
    own = Path("/proc/self/status").read_text().split("SigIgn:")[1].split()[0]  # what we inherited, it inherits
    assert int(ignored, 16) == int(own, 16)


def test_stdlib_names_in_the_working_directory_do_not_reach_the_shim(start: Start, tmp_path: Path) -> None:
    (tmp_path / "signal.py").write_text("raise SystemExit(3)")
    assert start(("true",), cwd=tmp_path).wait(10) == 0


def test_the_shim_holds_the_lock_and_the_launcher_has_no_copy(
    start: Start, engine: Engine, locks: LockDirectory
) -> None:
    job = start(engine.argv("pass", "pass"))
    residency = locks.path / RESIDENCY

    def holds(pid: int) -> bool:
        return any(os.path.realpath(f"/proc/{pid}/fd/{fd}") == str(residency) for fd in os.listdir(f"/proc/{pid}/fd"))

    pids = [engine.pid("first"), engine.pid("child1")]
    assert set(job.pids()) == set(pids)
    assert [holds(pid) for pid in (job.pid, os.getpid(), *pids)] == [True, False, False, False]


def test_row02_killed_launcher_frees_the_lock_only_after_the_job(
    launch: Launch, engine: Engine, locks: LockDirectory
) -> None:
    launcher = launch(engine.argv("ignore()", "ignore()", ESCAPED), grace_s=0.3)
    shim = launcher.hear()["shim"]
    pids = [engine.pid(name) for name in ("first", "child1", "child2")]
    launcher.kill()
    with pytest.raises(BusyError, match=rf"launcher is gone.*pid {shim}"):
        locks.take(RESIDENCY)

    until(lambda: is_free(locks, pids))


def test_launcher_killed_at_any_moment_of_the_start(launch: Launch, engine: Engine, locks: LockDirectory) -> None:
    argv = engine.argv("ignore()", ESCAPED)
    for delay_ms in range(0, 120, 8):
        launcher = launch(argv, grace_s=0.0)
        time.sleep(delay_ms / 1000)
        launcher.kill()
        until(lambda: not status(locks).held)
        assert not any(alive(pid) for pid in engine.pids())


def test_row04_first_process_killed_takes_the_rest_along(start: Start, engine: Engine) -> None:
    job = start(engine.argv("pass", "pass", ESCAPED), grace_s=0.2)
    pids = [engine.pid(name) for name in ("first", "child1", "child2")]
    os.kill(pids[0], signal.SIGKILL)
    assert job.wait(10) == 128 + signal.SIGKILL
    assert not any(alive(pid) for pid in pids)


def test_an_orphaned_grandchild_belongs_to_the_job(start: Start, engine: Engine) -> None:
    # The middle process ends at once, so nothing but adoption ties the grandchild to the job.
    job = start(engine.argv("pass", "os.fork() and os._exit(0); os.setsid()"))
    pids = [engine.pid("first"), engine.pid("child1")]
    assert set(job.pids()) == set(pids)
    assert job.stop() == 128 + signal.SIGTERM
    assert not any(alive(pid) for pid in pids)


def test_a_deaf_process_outside_the_session_dies_after_the_grace(start: Start, engine: Engine) -> None:
    job = start(engine.argv("pass", ESCAPED), grace_s=0.5)
    pids = [engine.pid("first"), engine.pid("child1")]
    begun = time.monotonic()
    job.stop()
    assert 0.4 < time.monotonic() - begun < 5
    assert not any(alive(pid) for pid in pids)
    assert job.pids() == ()


def test_the_grace_is_given(start: Start, engine: Engine, tmp_path: Path) -> None:
    body = f"signal.signal(15, lambda *_: (time.sleep(0.3), open({str(tmp_path / 'saved')!r}, 'w'), sys.exit(0)))"
    job = start(engine.argv(body))
    engine.pid("first")
    assert job.stop() == 0
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGHUP])
def test_row13_a_second_signal_skips_the_grace(start: Start, engine: Engine, second: signal.Signals) -> None:
    job = start(engine.argv("ignore()", ESCAPED), grace_s=60)
    pids = [engine.pid("first"), engine.pid("child1")]
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(0.3) is None
    assert all(alive(pid) for pid in pids)
    os.kill(job.pid, second)
    assert job.wait(10) == 128 + signal.SIGKILL
    assert not any(alive(pid) for pid in pids)


def test_a_signal_right_after_the_start_is_not_lost(start: Start, tmp_path: Path) -> None:
    for delay_ms in range(0, 40, 5):
        with start(("sleep", "60"), output=tmp_path / "log") as job:
            time.sleep(delay_ms / 1000)
            os.kill(job.pid, signal.SIGINT)
            assert job.wait(10) == 128 + signal.SIGTERM
    assert (tmp_path / "log").read_text() == ""


def test_the_launcher_can_skip_the_grace(start: Start, engine: Engine) -> None:
    job = start(engine.argv("ignore()"), grace_s=60)
    engine.pid("first")
    hurry = threading.Event()
    threading.Timer(0.2, hurry.set).start()
    assert job.stop(skip_grace=hurry.is_set) == 128 + signal.SIGKILL


def test_kill_reaches_a_job_whose_shim_is_stopped(start: Start, engine: Engine) -> None:
    job = start(engine.argv("ignore()", ESCAPED))
    pids = [engine.pid("first"), engine.pid("child1")]
    os.kill(job.pid, signal.SIGSTOP)
    assert job.kill() == 128 + signal.SIGKILL
    assert not any(alive(pid) for pid in pids)


def test_a_killed_shim_leaves_nobody_while_the_launcher_lives(
    start: Start, engine: Engine, locks: LockDirectory
) -> None:
    job = start(engine.argv("pass", "pass", ESCAPED))
    pids = [engine.pid(name) for name in ("first", "child1", "child2")]
    assert set(job.pids()) == set(pids)
    os.kill(job.pid, signal.SIGKILL)
    with pytest.raises(BusyError):
        start(("true",))
    assert job.wait(10) == 128 + signal.SIGKILL
    assert not any(alive(pid) for pid in pids)


def test_a_killed_shim_takes_the_command_along_when_the_launcher_is_dead_too(launch: Launch, engine: Engine) -> None:
    launcher = launch(engine.argv("ignore()"), grace_s=60)
    shim = launcher.hear()["shim"]
    first = engine.pid("first")
    launcher.kill()
    os.kill(shim, signal.SIGKILL)
    until(lambda: not alive(first))


def test_a_shim_whose_launcher_is_already_dead_starts_nothing(tmp_path: Path) -> None:
    lock_fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    options = ("--lock-fd", str(lock_fd), "--parent", "1", "--grace", "0")
    command = (sys.executable, "-P", "-m", "thor_spec.guard.shim", *options, "--", "touch", tmp_path / "ran")
    assert subprocess.run(command, pass_fds=(lock_fd,)).returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "ran").exists()
    os.close(lock_fd)


def test_a_launcher_thread_that_ends_does_not_end_the_job(start: Start, engine: Engine) -> None:
    jobs: list[Job] = []

    def start_and_end() -> None:
        jobs.append(start(engine.argv("pass")))
        engine.pid("first")  # by now the shim has asked to hear of our end

    thread = threading.Thread(target=start_and_end)
    thread.start()
    thread.join()
    first = engine.pid("first")
    assert jobs[0].wait(0.5) is None
    assert alive(first)


def test_row25_a_survivor_of_sigkill_is_named_and_keeps_the_locks(
    start: Start, engine: Engine, locks: LockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(engine.argv("ignore()"))
    first = engine.pid("first")
    with monkeypatch.context() as patch:
        patch.setattr(processes, "send", lambda *_: True)
        patch.setattr(cgroup, "kill", lambda _: True)
        patch.setattr(subprocess.Popen, "send_signal", lambda *_: None)
        with pytest.raises(StuckInKernelError, match=rf"pid {first} \(.*state S\).*Reboot"):
            job.stop(grace_s=0.1, kill_wait_s=0.2)
    job.close()
    assert status(locks).admission_held
    assert status(locks).residency_held


@pytest.mark.parametrize("name", [ADMISSION, RESIDENCY])
@pytest.mark.parametrize("launcher_lives", [True, False])
def test_a_lock_file_deleted_under_its_holder_stops_the_next_start(
    launch: Launch, start: Start, engine: Engine, locks: LockDirectory, name: str, launcher_lives: bool
) -> None:
    launcher = launch(engine.argv("ignore()"), grace_s=1.0)
    launcher.hear()
    engine.pid("first")
    if not launcher_lives:
        launcher.kill()
    (locks.path / name).unlink()
    with pytest.raises(LockPathError, match=f"{name} is missing"):
        start(("true",))
    assert alive(engine.pid("first"))


def test_a_caller_keeps_its_admission_over_several_jobs(start: Start, locks: LockDirectory) -> None:
    admission = locks.take(ADMISSION)
    for _ in range(2):
        with start(("true",), admission=admission) as job:
            assert job.wait(10) == 0
        with pytest.raises(BusyError):
            start(("true",))
    admission.release()
    assert start(("true",)).wait(10) == 0


def test_a_failed_start_gives_both_locks_back(start: Start, locks: LockDirectory, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        start(("true",), cwd=tmp_path / "absent")
    assert not status(locks).held


def test_waiting_for_the_running_job(launch: Launch, engine: Engine) -> None:
    first = launch(engine.argv("pass"))
    assert first.hear()["code"] == 0
    second = launch(("true",), wait=True)
    first.order_stop()
    assert first.hear() == {"stopped": True}
    assert second.hear()["code"] == 0


def test_look_alikes_are_left_alone(start: Start, bystander: Bystander, engine: Engine, locks: LockDirectory) -> None:
    argv = engine.argv("pass", ESCAPED)
    bystander("VLLM::EngineCore")
    bystander(sys.executable, *argv)
    bystander("python", "-P", "-m", "thor_spec.guard.shim", "--lock-fd", "3", "--", *argv)
    job = start(argv, grace_s=0.2)
    engine.pid("child1")
    job.stop()  # the fixture checks that nobody else was signalled


def test_the_record_follows_the_phase(start: Start, engine: Engine, locks: LockDirectory) -> None:
    job = start(engine.argv("pass"), title="serve tiny", unit="thor-spec.service")
    job.note(phase="ready", url="http://127.0.0.1:8000")
    holder = status(locks).holder
    assert holder == job.identity
    assert holder is not None
    assert (holder.pid, holder.phase, holder.url) == (os.getpid(), "ready", "http://127.0.0.1:8000")


def test_the_shim_imports_little() -> None:
    listing = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-c", "import thor_spec.guard.shim"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    ours = listing[: listing.index("thor_spec.guard.shim")].rpartition("| site\n")[2]
    names = set(re.findall(r"\|\s+([\w.]+)$", ours, re.M))
    allowed = set(sys.stdlib_module_names) | {"thor_spec"}
    assert {name.partition(".")[0] for name in names} <= allowed
    assert not names & {"subprocess", "json", "dataclasses", "asyncio", "multiprocessing", "logging"}


def test_identity_of_the_shim_is_in_the_residency_record(start: Start, engine: Engine, locks: LockDirectory) -> None:
    job = start(engine.argv("pass"))
    fd = locks.open(RESIDENCY)
    record = identity.read(fd)
    os.close(fd)
    assert record is not None
    assert (record.pid, record.uuid, record.is_alive) == (job.pid, job.identity.uuid, True)
