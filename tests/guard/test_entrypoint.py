"""The first process of a container, with real locks, real exec, and other mount namespaces where they can be made."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from thor_spec.guard import entrypoint
from thor_spec.guard.locks import RESIDENCY, LockDirectory
from thor_spec.guard.status import taken_by

from .waiting import PYTHON, until

ENTRYPOINT = (sys.executable, "-I", "-S", entrypoint.__file__)
HOLD = (*PYTHON, "import sys, time; print('up', flush=True); time.sleep(60)")


@pytest.fixture
def lock(locks: LockDirectory) -> Path:
    locks.take(RESIDENCY).release()
    return locks.path / RESIDENCY


def is_free(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def run(*arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*ENTRYPOINT, *arguments], capture_output=True, text=True, timeout=20, **options)  # type: ignore[call-overload, no-any-return]


def test_the_lock_is_kept_across_exec_until_the_command_ends(lock: Path, locks: LockDirectory) -> None:
    command = [*ENTRYPOINT, "--lock", str(lock), "--", *HOLD]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as held:
        assert held.stdout
        assert held.stdout.readline() == b"up\n"
        assert taken_by(locks, RESIDENCY) == held.pid
        assert not is_free(lock)
        links = [
            os.readlink(f"/proc/{held.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{held.pid}/fd") if int(fd) >= 100
        ]
        assert links == [str(lock)]
        held.kill()
    assert is_free(lock)


def test_a_script_that_redirects_low_descriptors_keeps_the_lock(lock: Path) -> None:
    script = "exec 3>&1 4>&1 9>&1; exec 3>&- 4>&- 9>&-; echo up; read x"
    command = [*ENTRYPOINT, "--lock", str(lock), "--", "bash", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
        assert held.stdout
        held.stdout.readline()
        assert not is_free(lock)
        held.kill()


def test_row01_a_taken_lock_refuses_before_the_command_exists(lock: Path, tmp_path: Path) -> None:
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = run("--lock", str(lock), "--", "touch", str(tmp_path / "ran"))
    assert done.returncode == 10
    assert "device is in use" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_of_many_entry_points_at_once_one_wins(lock: Path) -> None:
    started = [
        subprocess.Popen([*ENTRYPOINT, "--lock", str(lock), "--", *HOLD], stderr=subprocess.DEVNULL) for _ in range(12)
    ]
    until(lambda: sum(process.poll() is not None for process in started) == 11)
    assert sorted(str(process.returncode) for process in started) == ["10"] * 11 + ["None"]
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.unlink(), "cannot be opened (No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "not a plain file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not a plain file"),
    ],
    ids=["missing", "directory", "pipe"],
)
def test_a_lock_that_excludes_nobody_is_refused(lock: Path, make: Callable[[Path], object], says: str) -> None:
    make(lock)
    done = run("--lock", str(lock), "--", "true")
    assert (done.returncode, done.stderr.count("\n")) == (14, 1)
    assert says in done.stderr


def test_usage_and_commands_that_cannot_run(lock: Path) -> None:
    assert run("--lock", str(lock)).returncode == 2
    assert run("--lock", "--", "true").returncode == 2
    assert run("--surprise", "1", "--", "true").returncode == 2
    assert run("--", "true").returncode == 14  # the mount of a container is not here
    assert run("--lock", str(lock), "--", "/no/such/engine").returncode == 127
    assert run("--lock", str(lock), "--", "/etc/passwd").returncode == 126
    assert run("--lock", str(lock), "--", "sh", "-c", "exit 7").returncode == 7


def test_it_imports_little_and_nothing_of_ours(lock: Path) -> None:
    listing = subprocess.run(
        [sys.executable, "-X", "importtime", *ENTRYPOINT[1:], "--lock", str(lock), "--", "true"],
        capture_output=True,
        text=True,
    ).stderr
    names = {name.partition(".")[0] for name in re.findall(r"\|\s+([\w.]+)$", listing, re.M)}
    assert "fcntl" in names
    assert names <= set(sys.stdlib_module_names)
    assert not names & {"subprocess", "json", "logging", "ctypes", "torch"}


def test_row21_a_read_only_mount_in_another_namespace_locks(lock: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.touch()
    command = " ".join((*ENTRYPOINT, "--lock", str(inside), "--", "sh", "-c", "'echo up; read x'"))
    script = (
        f"mount --bind {lock} {inside} && mount -o remount,ro,bind {inside} && ! echo x >{inside} && exec {command}"
    )
    unshare = ["unshare", "--mount", "sh", "-c", f"{script} 2>/dev/null"]
    if os.getuid() or not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("not run: mount namespaces need root here")
    with subprocess.Popen(unshare, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
        assert held.stdout
        assert held.stdout.readline() == b"up\n"
        assert inside.read_bytes() == b""  # the mount is theirs alone
        assert not is_free(lock)
        assert run("--lock", str(lock), "--", "true").returncode == 10
        held.communicate(b"\n")
    assert is_free(lock)


def test_row09_a_file_deleted_on_the_host_is_refused_inside(lock: Path, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.touch()
    # /proc/self/fd stands in for the mount: it still leads to the file after the name is gone.
    fd = os.open(lock, os.O_RDONLY)
    lock.unlink()
    done = run("--lock", f"/proc/self/fd/{fd}", "--", "true", pass_fds=(fd,))
    os.close(fd)
    assert done.returncode == 14
    assert "deleted or replaced on the host" in done.stderr


def test_the_shipped_script_becomes_the_command(lock: Path) -> None:
    script = Path(__file__).parents[2] / "deploy" / "entrypoint"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [script, "--lock", str(lock), "--", "sh", "-c", "echo $0; exit 3", "x"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (3, "x\n")
    if shutil.which("shellcheck"):
        assert subprocess.run(["shellcheck", script]).returncode == 0
