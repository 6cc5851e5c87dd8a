"""The watchdog as a process: what it is, and what happens when it is the one that dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from thor_spec.errors import GuardFailureError, MemoryGuardError
from thor_spec.guard import cgroup, processes, watchdog, watchdog_handle
from thor_spec.guard.locks import LockDirectory
from thor_spec.guard.memory import GIB
from thor_spec.guard.status import status

from .conftest import Bystander, Engine
from .guarding import DEAF, ESCAPED, Guard, checked_until_raised, record
from .series import FakeProc
from .waiting import alive, until


def test_row10_a_watchdog_with_a_reused_pid_signals_nobody(
    bystander: Bystander, proc: FakeProc, tmp_path: Path, state_dir: Path
) -> None:
    other = processes.read(bystander("VLLM::EngineCore").pid)
    assert other is not None
    me = processes.read(os.getpid())
    assert me is not None
    wrong = str(other.start_ticks - 1)
    sources = (
        "--meminfo",
        proc.sources.meminfo,
        "--pressure",
        proc.sources.pressure,
        "--floor",
        str(4 * GIB),
        "--grace",
        "0",
    )
    ours, theirs = watchdog_handle.socket.socketpair(
        watchdog_handle.socket.AF_UNIX, watchdog_handle.socket.SOCK_SEQPACKET
    )
    proc.available(1.0)
    root = ("--root", other.pid, "--root-ticks", wrong, "--root-is", "shim")
    options = (*root, "--supervisor", other.pid, "--supervisor-ticks", wrong)
    rest = ("--socket", theirs.fileno(), "--state", state_dir, "--job", "{}")
    command = (sys.executable, "-P", "-m", "thor_spec.guard.watchdog", *map(str, (*options, *sources, *rest)))
    # Both named processes are gone, by their start times: it finds nobody to kill, and ends.
    assert subprocess.run(command, pass_fds=(theirs.fileno(),), timeout=30).returncode == 0
    ours.close()
    theirs.close()


def test_row24_a_killed_watchdog_is_replaced_once_and_the_second_loss_ends_the_job(
    guard: Guard, engine: Engine, proc: FakeProc
) -> None:
    notices: list[str] = []
    job = guard(engine.argv(DEAF), notice=notices.append)
    first = job.watchdog.pid
    os.kill(first, signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: job.check() or job.watchdog.pid != first)
    assert time.monotonic() - killed < 2.0
    assert any("a new one was started" in line for line in notices)
    until(lambda: job.check() or job.watchdog.beats)
    engine_pid = engine.pid("first")
    os.kill(job.watchdog.pid, signal.SIGKILL)
    with pytest.raises(GuardFailureError, match="a second time") as raised, job:
        checked_until_raised(job)
    assert raised.value.exit_code == 70
    assert not alive(engine_pid)


def test_row24_the_second_watchdog_guards_like_the_first_and_reads_on(
    guard: Guard, engine: Engine, proc: FakeProc
) -> None:
    job = guard(engine.argv(DEAF))
    first = job.watchdog.pid
    os.kill(first, signal.SIGKILL)
    proc.kernel_says("6,2,2000,-;NVRM: [NV_ERR_NO_MEMORY]")  # nobody reads the log at this moment
    with pytest.raises(MemoryGuardError, match="kernel log"):
        checked_until_raised(job)
    assert job.watchdog.pid != first


def test_row24_a_silent_watchdog_is_lost_after_two_seconds(guard: Guard, engine: Engine) -> None:
    job = guard(engine.argv("pass"))
    first = job.watchdog.pid
    os.kill(first, signal.SIGSTOP)
    silent = time.monotonic()
    until(lambda: job.check() or job.watchdog.pid != first)
    assert 1.5 < time.monotonic() - silent < 4.0
    assert not alive(first)


def test_row15_a_paused_supervisor_does_not_blame_the_watchdog(guard: Guard, engine: Engine) -> None:
    job = guard(engine.argv("pass"))
    first = job.watchdog.pid
    os.kill(first, signal.SIGSTOP)  # the whole machine slept, the watchdog too
    now = time.monotonic() + 3600
    job.watchdog._clock = lambda: now
    job.check()
    assert job.watchdog.pid == first
    os.kill(first, signal.SIGCONT)


def test_row25_a_process_that_survives_sigkill_is_not_released_as_clean(
    guard: Guard, engine: Engine, locks: LockDirectory, state_dir: Path
) -> None:
    """A process in a frozen cgroup of the first version is in state D, and SIGKILL waits until it thaws."""
    from thor_spec.errors import StuckInKernelError

    freezer = Path("/sys/fs/cgroup/freezer") / f"thor-spec-test-{os.getpid()}"
    try:
        freezer.mkdir()
    except OSError:
        pytest.skip("this machine lends no cgroup v1 freezer, so no process can be put into state D")
    job = guard(engine.argv("pass"), settings={"kill_wait_s": 0.3}, grace_s=0.1)
    first = engine.pid("first")
    (freezer / "cgroup.procs").write_text(str(first))
    (freezer / "freezer.state").write_text("FROZEN")
    try:
        with pytest.raises(StuckInKernelError, match=rf"pid {first} \(.*state D\).*Reboot") as raised, job:
            pass
        assert raised.value.exit_code == 40
        assert status(locks).residency_held
        kept = record(state_dir)
        assert kept.exit_code == 40
        assert f"pid {first}" in kept.cause
        assert kept.boot_id == processes.boot_id()
        assert any(line.startswith(f"pid {first} waits in the kernel: ") for line in kept.notices)
    finally:
        (freezer / "freezer.state").write_text("THAWED")
        until(lambda: not alive(first))
        until(lambda: job.job.poll() is not None)
        freezer.rmdir()


def test_row09_a_deleted_lock_file_alarms_while_the_job_goes_on(
    guard: Guard, engine: Engine, locks: LockDirectory
) -> None:
    notices: list[str] = []
    job = guard(engine.argv("pass"), notice=notices.append)
    (locks.path / "admission").unlink()
    until(lambda: job.check() or any(line.startswith("ALARM") for line in notices))
    assert job.job.poll() is None
    assert len([line for line in notices if line.startswith("ALARM")]) == 1


def test_the_watchdog_shields_itself_or_says_so(guard: Guard, engine: Engine) -> None:
    notices: list[str] = []
    job = guard(engine.argv("pass"), notice=notices.append)
    until(lambda: job.check() or True)
    own = Path(f"/proc/{job.watchdog.pid}")
    locked_kib = int((own / "status").read_text().split("VmLck:")[1].split()[0])
    assert (locked_kib > 0) != any("not locked into memory" in line for line in notices)
    score = (own / "oom_score_adj").read_text().strip()
    assert (score == "-1000") != any("not exempt from the OOM killer" in line for line in notices)
    assert Path(f"/proc/{engine.pid('first')}/oom_score_adj").read_text().strip() == "500"


@pytest.mark.parametrize("uid", [0, 1000])
def test_root_is_not_advised_to_run_as_root(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: SimpleNamespace(mlockall=lambda _: -1))
    monkeypatch.setattr("os.open", forbidden)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    locked, exempt = watchdog.shield()
    assert ("LimitMEMLOCK, or run as root." in locked, "LimitMEMLOCK." in locked) == (bool(uid), not uid)
    assert ("_RESOURCE, or run as root." in exempt, "_RESOURCE." in exempt) == (bool(uid), not uid)


def test_the_watchdog_holds_no_lock_and_ignores_requests(guard: Guard, engine: Engine, locks: LockDirectory) -> None:
    job = guard(engine.argv("pass"))
    held = {os.path.realpath(f"/proc/{job.watchdog.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{job.watchdog.pid}/fd")}
    assert not any(str(locks.path) in name for name in held)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(job.watchdog.pid, signum)
    before = job.watchdog.pid
    beat = job.watchdog.available_bytes
    assert beat is not None
    until(lambda: job.check() or job.watchdog._heard > time.monotonic() - 0.1)
    assert job.watchdog.pid == before
    assert job.watchdog.respawns == 0


def test_the_watchdog_ends_with_its_job(guard: Guard, engine: Engine) -> None:
    job = guard(engine.argv("pass"))
    pid = job.watchdog.pid
    with job:
        pass
    assert not alive(pid)
    assert job.store.kept is not None
    assert job.store.kept.cause == "requested stop"


def test_the_job_has_a_cgroup_of_its_own_where_the_machine_lends_one(guard: Guard, engine: Engine) -> None:
    job = guard(engine.argv("pass", ESCAPED))
    path = job.job.members.cgroup
    if path is None:
        pytest.skip("this machine lends no cgroup v2 to this user")
    pids = {engine.pid("first"), engine.pid("child1")}
    assert set(cgroup.pids(path)) == pids
    assert job.job.pid not in cgroup.pids(path)
    assert cgroup.kill(path)
    until(lambda: not any(alive(pid) for pid in pids))
    until(lambda: job.job.poll() is not None)
    assert not os.path.exists(path)


def test_the_watchdog_starts_fast() -> None:
    """Nothing but the standard library and the guard; psutil, asyncio and their like take longer than a poll."""
    listing = subprocess.run(
        [sys.executable, "-P", "-c", "import sys, thor_spec.guard.watchdog; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    mine = {name.partition(".")[0] for name in listing}
    foreign = {name for name in mine - set(sys.stdlib_module_names) if not name.startswith("__editable__")}
    assert foreign <= {"thor_spec", "__main__", "sitecustomize", "_distutils_hack", "_virtualenv"}
    assert not {"asyncio", "subprocess", "logging", "multiprocessing"} & set(listing)
