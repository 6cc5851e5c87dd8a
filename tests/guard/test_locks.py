"""The lock directory, and what it refuses."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thor_spec.errors import BusyError, LockPathError
from thor_spec.guard import identity
from thor_spec.guard.locks import ADMISSION, RESIDENCY, LockDirectory


def test_first_use_makes_a_private_directory(locks: LockDirectory) -> None:
    assert not locks.exists
    lock = locks.take(ADMISSION)
    assert [locks.path.parent.stat().st_mode & 0o777, locks.path.stat().st_mode & 0o777] == [0o700, 0o700]
    for name in (ADMISSION, RESIDENCY):
        info = (locks.path / name).stat()
        assert (info.st_mode & 0o777, info.st_size) == (0o600, identity.RECORD_BYTES)
    assert not os.get_inheritable(lock.fd)
    lock.release()


def test_the_environment_names_the_private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THOR_SPEC_RUNTIME_DIR", str(tmp_path / "mine"))
    assert LockDirectory.find(system=tmp_path / "absent").path.parent == tmp_path / "mine"


def test_a_held_lock_names_its_holder_at_once(locks: LockDirectory) -> None:
    record = identity.of_process(os.getpid(), uuid="u", argv=("vllm", "serve", "tiny"), title="demo")
    held = locks.take(ADMISSION, record)
    begun = time.monotonic()
    with pytest.raises(BusyError, match=rf"pid {os.getpid()} \(demo\), started 20.*`thor-spec stop`"):
        locks.take(ADMISSION)
    assert time.monotonic() - begun < 1
    held.release()
    again = locks.take(ADMISSION)
    assert identity.read(again.fd) is None
    again.release()


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 9000, b'{"schema": 1}', b"[" * 4096], ids=len)
def test_garbage_in_the_record_neither_frees_nor_blocks(locks: LockDirectory, garbage: bytes) -> None:
    held = locks.take(ADMISSION)
    (locks.path / ADMISSION).write_bytes(garbage)
    with pytest.raises(BusyError, match="does not name"):
        locks.take(ADMISSION)
    held.close()
    locks.take(ADMISSION).release()


def test_row11_a_stale_record_is_overwritten(locks: LockDirectory) -> None:
    me = identity.of_process(os.getpid(), uuid="new")
    stale = identity.Identity(pid=me.pid, start_ticks=1, boot_id=me.boot_id, uuid="old", started_at="2020")
    locks.take(ADMISSION, stale).close()
    held = locks.take(ADMISSION, me)
    assert identity.read(held.fd) == me
    held.release()


@pytest.mark.parametrize("names", [(ADMISSION,), (RESIDENCY,), (ADMISSION, RESIDENCY)], ids=str)
def test_a_deleted_lock_file_stops_starts_and_is_not_made_anew(locks: LockDirectory, names: tuple[str, ...]) -> None:
    held = {name: locks.take(name) for name in (ADMISSION, RESIDENCY)}
    for name in names:
        (locks.path / name).unlink()
        with pytest.raises(LockPathError, match="removed or replaced"):
            held[name].verify()
        with pytest.raises(LockPathError, match="is missing"):
            locks.take(name)
        assert not (locks.path / name).exists()
    for lock in held.values():
        lock.release()


@pytest.mark.parametrize("linked", [False, True])
def test_a_file_replaced_while_it_is_locked_is_noticed(
    locks: LockDirectory, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    locks.take(ADMISSION).release()
    real = fcntl.flock

    def replaced(fd: int, operation: int) -> None:
        real(fd, operation)
        if linked:
            (locks.path / "old").hardlink_to(locks.path / ADMISSION)
        (locks.path / "new").touch()
        (locks.path / "new").rename(locks.path / ADMISSION)

    monkeypatch.setattr(fcntl, "flock", replaced)
    with pytest.raises(LockPathError, match="removed or replaced"):
        locks.take(ADMISSION)


def symlink(path: Path) -> None:
    (path.parent / "target").mkdir(mode=0o700)
    path.symlink_to("target")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.touch(), "not a directory"),
        (symlink, "symbolic link"),
        (lambda path: path.symlink_to("nowhere"), "symbolic link"),
        (lambda path: (path.mkdir(), path.chmod(0o777)), "writable by other users"),
    ],
    ids=["file", "symlink", "dangling", "open"],
)
@pytest.mark.parametrize("below", [(), ("locks",)], ids=["runtime", "locks"])
def test_a_directory_that_others_could_redirect_is_refused(
    locks: LockDirectory, make: Callable[[Path], Any], why: str, below: tuple[str, ...]
) -> None:
    path = locks.path.parent.joinpath(*below)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    make(path)
    with pytest.raises(LockPathError, match=why) as caught:
        locks.take(ADMISSION)
    assert caught.value.exit_code == 14
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_directory_of_another_user_is_refused(locks: LockDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    locks.take(ADMISSION).release()
    monkeypatch.setattr(os, "getuid", lambda: locks.path.stat().st_uid + 1)
    with pytest.raises(LockPathError, match="owned by uid"):
        locks.take(ADMISSION)


@pytest.mark.parametrize("where", ["/proc/thor-spec", "/proc/self/stat/thor-spec"])
def test_a_place_where_nothing_can_be_made_is_refused(where: str, tmp_path: Path) -> None:
    with pytest.raises(LockPathError, match="THOR_SPEC_RUNTIME_DIR"):
        LockDirectory.find(system=tmp_path / "absent", private=Path(where)).take(ADMISSION)


def test_row21_a_read_only_file_system_still_locks(locks: LockDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    locks.take(ADMISSION).release()
    real = os.open

    def read_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    held = locks.take(ADMISSION, identity.of_process(os.getpid(), uuid="u"))
    with pytest.raises(BusyError):
        locks.take(ADMISSION)
    held.release()
    shutil.rmtree(locks.path)
    with pytest.raises(LockPathError, match="Read-only file system"):
        locks.take(ADMISSION)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A stand-in for the system directory; its parents are open to everybody, unlike pytest's."""
    parent = Path(tempfile.mkdtemp())
    parent.chmod(0o755)
    (parent / "thor-spec").mkdir(mode=0o770)
    yield parent / "thor-spec"
    (parent / "thor-spec").chmod(0o700)
    shutil.rmtree(parent)


def test_the_system_directory_is_used_where_it_is_complete(shared: Path, tmp_path: Path) -> None:
    for name in (ADMISSION, RESIDENCY):
        (shared / name).touch()
    locks = LockDirectory.find(system=shared, private=tmp_path)
    held = locks.take(ADMISSION)
    assert held.path == shared / ADMISSION
    assert not list(tmp_path.iterdir())
    held.release()


def test_an_incomplete_system_directory_is_never_passed_over(shared: Path, tmp_path: Path) -> None:
    with pytest.raises(LockPathError, match=r"admission is missing.*systemd-tmpfiles"):
        LockDirectory.find(system=shared, private=tmp_path).take(ADMISSION)
    assert not list(tmp_path.iterdir())


def refused_as_nobody(system: Path, private: Path, answers: Any) -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    try:
        LockDirectory.find(system=system, private=private).take(ADMISSION)
    except LockPathError as error:
        answers.send(str(error))


def test_a_system_directory_without_admittance_names_its_group(shared: Path, tmp_path: Path) -> None:
    for name in (ADMISSION, RESIDENCY):
        (shared / name).touch(mode=0o600)
    if os.getuid():
        shared.chmod(0)
    receive, send = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=refused_as_nobody, args=(shared, tmp_path, send))
    child.start()
    child.join()
    assert receive.poll(), "the lock was given"
    assert "Join the group " in (text := receive.recv()), text
    assert not list(tmp_path.iterdir())


def test_many_first_users_make_one_directory(locks: LockDirectory) -> None:
    gate = threading.Barrier(8)
    taken, failed = [], []

    def use() -> None:
        gate.wait()
        try:
            taken.append(locks.take(ADMISSION))
        except BusyError as error:
            failed.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(failed)) == (1, 7)
    assert os.listdir(locks.path.parent) == ["locks"]
    taken[0].release()


def test_waiting_tells_for_whom_once_and_then_takes(locks: LockDirectory) -> None:
    held = locks.take(ADMISSION, identity.of_process(os.getpid(), uuid="first"))
    heard: list[Any] = []
    threading.Timer(0.35, held.release).start()
    lock = locks.take(ADMISSION, wait=True, report=heard.append)
    assert [holder and holder.uuid for holder in heard] == ["first"]
    lock.release()
