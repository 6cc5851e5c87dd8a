"""The lock directory for all users of a machine: made, and put right, by the administrator.

A running job holds inodes, not names. So nothing here is ever removed or renamed over: modes are changed in place, and
a file that is missing is made again only after a look for whoever may hold the old one.

Source: tmpfiles.d(5) for the same set-up at boot, deploy/tmpfiles.d/thor-spec.conf.
"""

import fcntl
import grp
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from thor_spec import env
from thor_spec.errors import BusyError, LockPathError, OrphanError
from thor_spec.guard import entrypoint, identity, lockpath, marker, orphans, processes
from thor_spec.guard.locks import ADMISSION, RESIDENCY, SYSTEM_DIR
from thor_spec.guard.orphans import Orphan

GROUP = "thor-spec"
DIRECTORY_MODE = 0o2770
FILE_MODE = 0o660
NAMES = (ADMISSION, RESIDENCY)


def fix(
    path: Path = SYSTEM_DIR,
    *,
    group: str = GROUP,
    find_orphans: Callable[[Path], Iterable[Orphan]] | None = None,
) -> tuple[str, ...]:
    """Make the directory and its files, or put their owner, modes and sizes right; return what was done.

    A second call does nothing.

    Raises: LockPathError, if this is not root, or something is there that is not ours to replace; BusyError, while a
        lock is held; OrphanError, if a file is missing and somebody may hold the old one.
    """
    find_orphans = find_orphans or possible_holders
    if os.geteuid():
        raise LockPathError(
            f"Only root may set up {path}, which all users share. Run `sudo thor-spec doctor --fix-lock-dir`."
        )
    gid, done = _gid(group)
    if not lockpath.exists(path):
        _require_nobody(find_orphans(path), f"{path} is not there")
        _make(path, gid)
        return (*done, f"made {path} with {' and '.join(NAMES)}, for group {group}")
    lockpath.check(path, owners=(0,), shared=True)
    with ExitStack() as stack:
        fds = {}
        for name in NAMES:
            if lockpath.exists(path / name):
                fds[name] = _open(path / name)
                stack.callback(os.close, fds[name])
        for name, fd in fds.items():
            _lock(fd, path / name)  # until all is done: nobody starts on half a directory
        missing = [name for name in NAMES if name not in fds]
        if missing:
            _require_nobody(find_orphans(path), f"{' and '.join(missing)} is missing in {path}")
        done += _set(path, gid, DIRECTORY_MODE)
        for name, fd in fds.items():
            done += _set(fd, gid, FILE_MODE, path / name)
            if os.fstat(fd).st_size < identity.RECORD_BYTES:
                os.posix_fallocate(fd, 0, identity.RECORD_BYTES)
                done.append(f"gave {path / name} room for its record")
        for name in missing:
            _make_file(path / name, gid)
            done.append(f"made {path / name} again")
    return tuple(done)


def possible_holders(path: Path) -> Iterator[Orphan]:
    """Yield whatever may be a job that new locks at this path would not exclude, of all users.

    Raises: ContainerRuntimeError, if there is a container runtime and it hangs.
    """
    yield from orphans.find(path, everyone=True)
    for marked in marker.find(None):  # a job under a user's own locks, from before the system had any
        yield Orphan(marked.process.pid, f"{marker.title_of(marked.process)}, of job {marked.job}")
    # Inside a container, a lock file goes by the name of its mount.
    deleted = {f"{place} (deleted)" for place in (*(path / name for name in NAMES), entrypoint.LOCK)}
    for process in processes.snapshot():
        links = f"/proc/{process.pid}/fd"
        try:
            targets = {os.readlink(f"{links}/{fd}") for fd in os.listdir(links)}
        except OSError:
            continue
        if process.pid != os.getpid() and targets & deleted:
            yield Orphan(process.pid, f"{process.name}, holds a deleted lock file")


def _gid(group: str) -> tuple[int, list[str]]:
    try:
        return grp.getgrnam(group).gr_gid, []
    except KeyError:
        pass
    try:
        subprocess.run(
            ["groupadd", "--system", group],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=30,
            env=env.tool_environment(),
        )
        return grp.getgrnam(group).gr_gid, [f"made the group {group}: add users with `usermod -aG {group} USER`"]
    except (OSError, subprocess.SubprocessError, KeyError):
        raise LockPathError(
            f"There is no group {group}, and it could not be made. Run `groupadd --system {group}`, then this again."
        ) from None


def _require_nobody(found: Iterable[Orphan], why: str) -> None:
    """Raise OrphanError if a job may run under the locks that used to be here."""
    if alive := {orphan.pid or orphan.title: orphan for orphan in found}:
        raise OrphanError(
            f"{why}, and a job may still run: {', '.join(orphan.describe() for orphan in alive.values())}. New locks "
            "would let a second one in beside it. End it with `thor-spec reap --yes` or `kill`, then run this again."
        )


def _make(path: Path, gid: int) -> None:
    """Make the directory aside and move it into place whole: without its files it would count as damaged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        for name in NAMES:
            _make_file(fresh / name, gid)
        _set(fresh, gid, DIRECTORY_MODE)
        os.rename(fresh, path)
    except OSError as error:
        raise lockpath.refusal(path, f"cannot be made ({error.strerror})", "See to its parent directory.") from None


def _make_file(path: Path, gid: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, identity.RECORD_BYTES)  # a full disk must not lose the record later
        _set(fd, gid, FILE_MODE, path)
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise lockpath.refusal(path, f"cannot be opened ({error.strerror})", _BY_HAND) from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        os.close(fd)
        raise lockpath.refusal(path, "not a plain file with one name", _BY_HAND)
    return fd


_BY_HAND = "See who made it, and take it away by hand once `thor-spec reap` shows nothing."


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = identity.read(fd)
        who = holder.describe() if holder and holder.is_alive else "a process that its record does not name"
        raise BusyError(
            f"{path} is held by {who}, and its directory is not touched under a running job. "
            "Stop it with `thor-spec stop`, then run this again."
        ) from None


def _set(what: int | Path, gid: int, mode: int, path: Path | None = None) -> list[str]:
    """Set owner, group and mode where they differ; say so."""
    info = os.stat(what)
    if (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (0, gid, mode):
        return []
    os.chown(what, 0, gid)
    os.chmod(what, mode)  # after the owner: chown drops the set-group-id bit
    return [f"set {path or what} to mode {mode:o}, owner 0, group {gid}"]
