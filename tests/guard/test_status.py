"""Looking from another terminal, and stopping from there."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from thor_spec.errors import BusyError, LockPathError
from thor_spec.guard import identity, processes
from thor_spec.guard.locks import ADMISSION, RESIDENCY, LockDirectory
from thor_spec.guard.status import locked_inodes, status, stop

from .conftest import Bystander, Engine, Launcher, Start
from .waiting import alive, until

Launch = Callable[..., Launcher]


def test_only_granted_flocks_count() -> None:
    text = (
        "1: FLOCK  ADVISORY  WRITE 3786 fe:00:2147461 0 EOF\n"
        "1: -> FLOCK  ADVISORY  WRITE 3787 fe:00:99 0 EOF\n"
        "2: POSIX  ADVISORY  WRITE 812 00:1a:713 0 EOF\n"
        "3: FLOCK  ADVISORY  READ 0 103:02:5 0 EOF\n"
    )
    assert locked_inodes(text) == {(0xFE, 0, 2147461), (0x103, 2, 5)}


def test_looking_makes_and_takes_nothing(locks: LockDirectory) -> None:
    assert not status(locks).held
    assert stop(locks).holder is None
    assert not locks.path.parent.exists()


def test_a_running_job_is_described(start: Start, engine: Engine, locks: LockDirectory) -> None:
    job = start(engine.argv("pass", "os.setsid()"), title="demo")
    pids = {job.pid, engine.pid("first"), engine.pid("child1")}
    seen = status(locks)
    assert (seen.admission_held, seen.residency_held, seen.stale) == (True, True, False)
    assert set(seen.pids) == pids
    assert seen.holder == job.identity
    plain = json.loads(json.dumps(seen.as_dict()))
    assert (plain["held"], plain["holder"]["title"], plain["lock_dir"]) == (True, "demo", str(locks.path))
    job.stop()
    job.close()
    assert not status(locks).held
    assert status(locks).pids == ()


def test_row11_a_record_without_a_lock_is_stale(locks: LockDirectory) -> None:
    gone = subprocess.Popen(["sleep", "60"])
    record = identity.of_process(gone.pid, uuid="u")
    gone.kill()
    gone.wait()
    locks.take(ADMISSION, record).close()
    seen = status(locks)
    assert (seen.held, seen.stale, seen.holder) == (False, True, None)


def test_a_lock_that_proc_hides_is_seen_through_its_shim(
    launch: Launch, engine: Engine, locks: LockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(engine.argv("pass")).hear()
    engine.pid("first")
    monkeypatch.setattr("thor_spec.guard.status.locked_inodes", lambda _: set())
    seen = status(locks)
    assert (seen.admission_held, seen.residency_held) == (False, True)


@pytest.mark.parametrize("now", [False, True])
def test_stop_from_another_process(launch: Launch, engine: Engine, locks: LockDirectory, now: bool) -> None:
    launcher = launch(engine.argv("ignore()" if now else "pass"), grace_s=60)
    launcher.hear()
    first = engine.pid("first")
    threading.Thread(target=os.waitpid, args=(launcher.pid, 0)).start()  # a zombie cannot be told from a stuck one
    pid, launcher.pid = launcher.pid, 0
    # This launcher handles no signal: it dies, and the shim carries the order out.
    result = stop(locks, timeout_s=1.0 if now else 10.0)
    if now:
        assert not result.free
        assert stop(locks, now=True, timeout_s=10).free
    else:
        assert result.free
    assert result.holder is not None
    assert result.holder.pid == pid
    assert not alive(first)


SUPERVISOR = """
import signal, sys, threading
from pathlib import Path
from thor_spec.guard.job import Job
from thor_spec.guard.locks import LockDirectory

asked, hurried = threading.Event(), threading.Event()

def on_signal(*_):
    (hurried if asked.is_set() else asked).set()

for s in (signal.SIGTERM, signal.SIGINT):
    signal.signal(s, on_signal)
locks = LockDirectory.find(system=Path("/nonexistent"), private=Path(sys.argv[1]))
with Job.start(sys.argv[2:], locks=locks, grace_s=60, find_orphans=tuple) as job:
    while job.poll() is None and not asked.wait(0.05):
        pass
    job.stop(skip_grace=hurried.is_set)
"""


@pytest.mark.parametrize(("body", "now"), [("pass", False), ("ignore()", True)])
def test_stop_through_a_supervisor(engine: Engine, locks: LockDirectory, body: str, now: bool) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, locks.path.parent, *engine.argv(body)])
    first = engine.pid("first")
    begun = time.monotonic()
    result = stop(locks, now=now, timeout_s=20)
    assert result.free
    assert time.monotonic() - begun < 5
    assert result.holder is not None
    assert result.holder.pid == supervisor.pid
    assert not alive(first)
    assert supervisor.wait(5) == 0


@pytest.mark.parametrize("name", [ADMISSION, RESIDENCY])
def test_row10_a_reused_pid_is_never_signalled(locks: LockDirectory, bystander: Bystander, name: str) -> None:
    theirs = identity.of_process(bystander().pid, uuid="u")
    for wrong in (replace(theirs, start_ticks=theirs.start_ticks - 1), replace(theirs, boot_id="earlier")):
        held = locks.take(name, wrong)
        with pytest.raises(BusyError, match="nobody to signal safely"):
            stop(locks, now=True, timeout_s=1)
        held.release()


def test_row10_the_pid_is_checked_again_when_the_signal_is_sent(
    locks: LockDirectory, bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = identity.of_process(bystander().pid, uuid="u")
    held = locks.take(ADMISSION, theirs)
    real = processes.read
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: pytest.fail("signalled"))
    opened = os.pidfd_open

    def reused(pid: int) -> int:
        # Between the look and the signal, the pid goes to a process that started later.
        later = real(pid)
        assert later is not None
        monkeypatch.setattr(processes, "read", lambda _: later._replace(start_ticks=later.start_ticks + 1))
        return opened(pid)

    monkeypatch.setattr(os, "pidfd_open", reused)
    assert not stop(locks, timeout_s=0.2).free
    held.release()


def test_another_users_job_cannot_be_stopped(
    locks: LockDirectory, bystander: Bystander, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = locks.take(ADMISSION, identity.of_process(bystander().pid, uuid="u", title="theirs"))

    def denied(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(signal, "pidfd_send_signal", denied)
    with pytest.raises(LockPathError, match=r"another user.*theirs.*sudo"):
        stop(locks)
    held.release()


def test_a_job_without_its_launcher_can_be_hurried(launch: Launch, engine: Engine, locks: LockDirectory) -> None:
    launcher = launch(engine.argv("ignore()"), grace_s=60)
    shim = launcher.hear()["shim"]
    engine.pid("first")
    launcher.kill()
    until(lambda: not status(locks).admission_held)
    seen = status(locks)
    assert seen.residency_held
    assert seen.holder is not None
    assert seen.holder.pid == shim
    assert stop(locks, now=True, timeout_s=10).free


def test_a_missing_lock_file_is_reported(locks: LockDirectory, tmp_path: Path) -> None:
    locks.take(ADMISSION).release()
    (locks.path / RESIDENCY).unlink()
    with pytest.raises(LockPathError, match="residency is missing"):
        status(locks)


def test_status_needs_no_command_line_parser(tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['x', 'status', '--json']; from thor_spec.cli.entry import main; main()"
    code += "; print([m for m in ('typer', 'rich', 'yaml', 'pydantic', 'httpx') if m in sys.modules])"
    environment = {**os.environ, "THOR_SPEC_RUNTIME_DIR": str(tmp_path / "run")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    shown, modules = done.stdout.splitlines()
    assert json.loads(shown)["held"] is False
    assert modules == "[]"


def test_what_the_short_way_does_not_know_goes_to_the_parser() -> None:
    done = subprocess.run([sys.executable, "-m", "thor_spec", "status", "--help"], capture_output=True, text=True)
    assert "Example: thor-spec status" in done.stdout
    done = subprocess.run([sys.executable, "-m", "thor_spec", "status", "--nonsense"], capture_output=True, text=True)
    assert done.returncode == 2


def test_a_broken_lock_directory_is_told_in_short(tmp_path: Path) -> None:
    directory = LockDirectory.find(system=tmp_path / "none", private=tmp_path)
    directory.take(ADMISSION).release()
    (directory.path / RESIDENCY).unlink()
    done = subprocess.run(
        [sys.executable, "-m", "thor_spec", "status"],
        capture_output=True,
        text=True,
        env={**os.environ, "THOR_SPEC_RUNTIME_DIR": str(tmp_path)},
    )
    assert done.returncode == 14
    assert done.stderr.startswith("thor-spec: ")
