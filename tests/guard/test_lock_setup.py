"""The lock directory for all users: made, put right, and never pulled away from under a job."""

import grp
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thor_spec.errors import BusyError, LockPathError, OrphanError, ThorSpecError
from thor_spec.guard import identity, lock_setup, marker
from thor_spec.guard.job import Job
from thor_spec.guard.lock_setup import fix, possible_holders
from thor_spec.guard.locks import ADMISSION, RESIDENCY, LockDirectory
from thor_spec.guard.status import status, stop

from .conftest import Engine, Launcher
from .docker_stand_in import Docker
from .waiting import PYTHON, alive, until

GROUP = grp.getgrgid(65534).gr_name  # nobody's, which every machine has
NOBODY = 65534
TMPFILES = Path(__file__).parents[2] / "deploy" / "tmpfiles.d" / "thor-spec.conf"

as_root = pytest.mark.skipif(os.getuid() != 0, reason="not run: needs root")


@pytest.fixture
def system() -> Iterator[Path]:
    """The place of a system directory; its parents are open to everybody, unlike pytest's."""
    parent = Path(tempfile.mkdtemp())
    parent.chmod(0o755)
    yield parent / "thor-spec"
    shutil.rmtree(parent)


def locks_at(system: Path) -> LockDirectory:
    return LockDirectory.find(system=system, private=system.parent / "private")


def modes(system: Path) -> list[tuple[int, int, int, int]]:
    found = [os.stat(path) for path in (system, system / ADMISSION, system / RESIDENCY)]
    return [(info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode), info.st_ino) for info in found]


def as_nobody(action: Callable[[], Any]) -> Any:
    """Return what ``action`` returns, or the error it raises, in a process of another user in no group of ours."""
    receive, send = multiprocessing.Pipe(duplex=False)

    def child() -> None:
        os.setgroups([])
        os.setgid(NOBODY - 1)
        os.setuid(NOBODY)
        try:
            send.send(action())
        except ThorSpecError as error:
            send.send((error.exit_code, str(error)))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return receive.recv()


@as_root
def test_making_it_and_doing_nothing_the_second_time(system: Path) -> None:
    [said] = fix(system, group=GROUP, find_orphans=lambda _: ())
    assert said == f"made {system} with admission and residency, for group {GROUP}"
    assert [found[:3] for found in modes(system)] == [
        (0, NOBODY, 0o2770),
        (0, NOBODY, 0o660),
        (0, NOBODY, 0o660),
    ]
    assert (system / ADMISSION).stat().st_size == identity.RECORD_BYTES
    assert (system / ADMISSION).stat().st_blocks * 512 >= identity.RECORD_BYTES
    assert fix(system, group=GROUP) == ()
    assert os.listdir(system.parent) == ["thor-spec"]
    locks_at(system).take(ADMISSION).release()


@as_root
def test_modes_owners_and_sizes_are_put_right_in_place(system: Path) -> None:
    fix(system, group=GROUP, find_orphans=lambda _: ())
    before = modes(system)
    system.chmod(0o755)
    os.chown(system / ADMISSION, NOBODY, 0)
    (system / RESIDENCY).chmod(0o600)
    os.truncate(system / RESIDENCY, 1)
    done = fix(system, group=GROUP)
    assert [said.split()[0] for said in done] == ["set", "set", "set", "gave"]
    assert modes(system) == before  # the inodes too
    assert fix(system, group=GROUP) == ()


@as_root
@pytest.mark.parametrize("name", [ADMISSION, RESIDENCY])
def test_it_refuses_while_a_lock_is_held(system: Path, name: str) -> None:
    fix(system, group=GROUP, find_orphans=lambda _: ())
    held = locks_at(system).take(name, identity.of_process(os.getpid(), uuid="u", title="demo"))
    system.chmod(0o755)
    with pytest.raises(BusyError, match=rf"{name} is held by pid {os.getpid()} \(demo\).*thor-spec stop"):
        fix(system, group=GROUP)
    assert stat.S_IMODE(system.stat().st_mode) == 0o755
    held.release()
    assert len(fix(system, group=GROUP)) == 1


@as_root
def test_row09_a_deleted_lock_file_is_made_again_only_after_an_orphan_scan(
    system: Path, launch: Callable[..., Launcher], engine: Engine
) -> None:
    fix(system, group=GROUP, find_orphans=lambda _: ())
    locks = locks_at(system)
    job = Job.start(engine.argv("pass"), locks=locks, find_orphans=tuple)
    first = engine.pid("first")
    for name in (ADMISSION, RESIDENCY):
        (system / name).unlink()
    with pytest.raises(LockPathError, match="removed or replaced"):  # the holder's alarm
        job._admission.verify()
    with pytest.raises(LockPathError, match="is missing") as refused:  # and nobody else starts
        Job.start(("true",), locks=locks, find_orphans=tuple)
    assert refused.value.exit_code == 14
    with pytest.raises(OrphanError, match=rf"is missing in .*pid {job.pid} \(.*reap --yes") as caught:
        fix(system, group=GROUP)
    assert caught.value.exit_code == 11
    assert os.listdir(system) == []
    assert alive(first)
    job.stop()
    job.close()
    until(lambda: not {job.pid, first} & {one.pid for one in possible_holders(system)})
    assert [said.split()[0] for said in fix(system, group=GROUP, find_orphans=lambda _: ())] == ["made", "made"]
    locks.take(RESIDENCY).release()


@as_root
def test_row09_whoever_holds_the_deleted_file_open_is_named(system: Path) -> None:
    fix(system, group=GROUP, find_orphans=lambda _: ())
    with subprocess.Popen([*PYTHON, "import sys; sys.stdin.read()"], stdin=(system / RESIDENCY).open()) as holder:
        pass  # read to the end
    assert holder.returncode == 0
    body = f"import time; file = open({str(system / RESIDENCY)!r}); print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([*PYTHON, body], stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        (system / RESIDENCY).unlink()
        with pytest.raises(OrphanError, match=rf"pid {holder.pid} \(.*holds a deleted lock file"):
            fix(system, group=GROUP)
        holder.kill()


@as_root
def test_row09_a_whole_directory_that_is_gone_is_looked_behind_too(system: Path, engine: Engine) -> None:
    fix(system, group=GROUP, find_orphans=lambda _: ())
    job = Job.start(engine.argv("pass"), locks=locks_at(system), find_orphans=tuple)
    engine.pid("first")
    shutil.rmtree(system)
    with pytest.raises(OrphanError, match=rf"is not there.*pid {job.pid} "):
        fix(system, group=GROUP)
    assert not system.exists()
    job.stop()
    job.close()


@as_root
def test_the_first_set_up_sees_jobs_under_private_locks(system: Path, tmp_path: Path) -> None:
    environment = {**os.environ, **marker.environment("0b6c1c9e-59e0-4e2b-8f39-4b9c5a4a1c11", tmp_path / "locks")}
    with subprocess.Popen(["sleep", "60"], env=environment) as job:
        until(lambda: Path(f"/proc/{job.pid}/cmdline").read_bytes().startswith(b"sleep"))
        with pytest.raises(OrphanError, match=rf"pid {job.pid} \(sleep 60, of job"):
            fix(system, group=GROUP)
        job.kill()


@as_root
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.symlink_to("/tmp"), "symbolic link"),
        (lambda path: path.touch(), "not a directory"),
        (lambda path: (path.mkdir(), os.chown(path, NOBODY, 0)), "owned by uid"),
        (lambda path: (path.mkdir(), (path / ADMISSION).symlink_to("/etc/passwd")), "cannot be opened"),
        (lambda path: (path.mkdir(), (path / ADMISSION).mkdir()), "cannot be opened"),
        (lambda path: (path.mkdir(), os.mkfifo(path / RESIDENCY)), "not a plain file"),
        (
            lambda path: (path.mkdir(), (path / ADMISSION).touch(), (path / "x").hardlink_to(path / ADMISSION)),
            "one name",
        ),
    ],
    ids=["symlink", "file", "foreign", "link inside", "directory inside", "pipe inside", "hard link"],
)
def test_what_is_not_ours_to_replace_is_refused(system: Path, make: Callable[[Path], Any], says: str) -> None:
    make(system)
    with pytest.raises(LockPathError, match=says):
        fix(system, group=GROUP, find_orphans=lambda _: ())


def test_a_group_that_is_missing_is_made_or_asked_for(
    system: Path, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (docker.bin / "groupadd").write_text("#!/bin/sh\nexit 1\n")
    (docker.bin / "groupadd").chmod(0o755)
    with pytest.raises(LockPathError, match="groupadd --system no-such-group"):
        fix(system, group="no-such-group", find_orphans=lambda _: ())
    (docker.bin / "groupadd").write_text(f"#!/bin/sh\necho $@ > {docker.state}/made\n")
    monkeypatch.setattr(lock_setup.grp, "getgrnam", _once_made(docker.state / "made"))
    gid, said = lock_setup._gid("no-such-group")
    assert (gid, "made the group no-such-group" in said[0]) == (NOBODY, True)
    assert (docker.state / "made").read_text() == "--system no-such-group\n"


def _once_made(path: Path) -> Callable[[str], Any]:
    real = grp.getgrgid

    def getgrnam(name: str) -> Any:
        if not path.exists():
            raise KeyError(name)
        return real(NOBODY)

    return getgrnam


def test_only_root_may(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LockPathError, match="sudo thor-spec doctor --fix-lock-dir"):
        fix(system)
    assert not system.exists()
    done = subprocess.run(
        [sys.executable, "-m", "thor_spec", "doctor", "--help"], capture_output=True, text=True, timeout=30
    )
    assert "--fix-lock-dir" in done.stdout


@as_root
def test_row22_the_lock_of_another_user_refuses_with_identity_and_cannot_be_stopped(system: Path) -> None:
    fix(system, group=GROUP, find_orphans=lambda _: ())
    locks = locks_at(system)
    with subprocess.Popen(["sleep", "60"]) as theirs:
        held = locks.take(ADMISSION, identity.of_process(theirs.pid, uuid="u", title="theirs", argv=("vllm",)))
        os.chown(system, 0, NOBODY - 1)
        for name in (ADMISSION, RESIDENCY):
            os.chown(system / name, 0, NOBODY - 1)  # a group that both are in
        assert as_nobody(lambda: status(locks).holder is not None)
        code, text = as_nobody(lambda: locks.take(ADMISSION))
        assert (code, f"pid {theirs.pid} (theirs)" in text) == (10, True)
        code, text = as_nobody(lambda: stop(locks, timeout_s=1))
        assert (code, "another user" in text, "theirs" in text) == (14, True, True)
        assert theirs.poll() is None
        theirs.kill()
    held.release()


@as_root
def test_row23_permission_denied_names_the_group_and_nothing_private_is_made(system: Path) -> None:
    fix(system, group=GROUP, find_orphans=lambda _: ())
    code, text = as_nobody(lambda: locks_at(system).take(ADMISSION))
    assert code == 14
    assert f"Join the group {GROUP} (`sudo usermod -aG {GROUP} $USER`" in text
    assert not (system.parent / "private").exists()


@as_root
def test_row21_a_read_only_directory_locks_if_the_files_are_there(system: Path) -> None:
    fix(system, group=GROUP, find_orphans=lambda _: ())
    if not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("not run: no mount namespaces here")
    body = (
        "import sys\nfrom pathlib import Path\nfrom thor_spec.guard.locks import LockDirectory\n"
        "from thor_spec.errors import ThorSpecError\n"
        "try:\n"
        f"    held = LockDirectory(Path({str(system)!r}), system=True).take('admission')\n"
        "except ThorSpecError as error:\n    sys.exit(error.exit_code)\n"
        "print('held', flush=True)\nsys.stdin.read()\n"
    )
    script = f'mount --bind {system} {system} && mount -o remount,ro,bind {system} && exec "$0" -c "$1"'
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, body]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BusyError):
            locks_at(system).take(ADMISSION)
        holder.communicate()
    (system / RESIDENCY).unlink()
    assert subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 14


def test_tmpfiles_makes_the_same_and_takes_nothing_away(tmp_path: Path) -> None:
    if not shutil.which("systemd-tmpfiles") or os.getuid():
        pytest.skip("not run: needs systemd-tmpfiles and root")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "group").write_text("root:x:0:\nthor-spec:x:4242:\n")
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0::/:/bin/sh\n")

    def call(verb: str) -> None:
        subprocess.run(["systemd-tmpfiles", verb, f"--root={tmp_path}", TMPFILES], check=True)

    call("--create")
    system = tmp_path / "run" / "lock" / "thor-spec"
    made = modes(system)
    assert [found[:3] for found in made] == [(0, 4242, 0o2770), (0, 4242, 0o660), (0, 4242, 0o660)]
    (system / ADMISSION).write_text("a record")
    for name in (ADMISSION, RESIDENCY):
        os.utime(system / name, (1, 1))
    for verb in ("--clean", "--remove", "--create"):
        call(verb)
    assert modes(system) == made
    assert (system / ADMISSION).read_text() == "a record"


def test_tmpfiles_never_removes_by_age() -> None:
    lines = [line.split() for line in TMPFILES.read_text().splitlines() if line and not line.startswith("#")]
    assert {tuple(line[:5]) for line in lines if line[0] != "x"} == {
        ("d", "/run/lock/thor-spec", "2770", "root", "thor-spec"),
        ("f", "/run/lock/thor-spec/admission", "0660", "root", "thor-spec"),
        ("f", "/run/lock/thor-spec/residency", "0660", "root", "thor-spec"),
    }
    assert {line[0] for line in lines} == {"d", "f", "x"}  # no "+", "!", "D", "R": nothing truncates or removes
    assert {line[5] for line in lines} == {"-"}
