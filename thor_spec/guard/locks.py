"""The two locks that make a job exclusive, and the directory they live in.

"admission" belongs to the launcher for its whole life, "residency" to the job; a start needs both. They are flock(2)
locks, which the kernel drops with the last copy of the descriptor, so no crash leaves one behind. A lock is tied to the
inode: unlinking a held file or renaming over it would let a second holder in. Hence the files are opened without
O_CREAT, never removed, and compared with their path after locking.
"""

import errno
import fcntl
import grp
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thor_spec import env
from thor_spec.errors import BusyError
from thor_spec.guard import identity, lockpath
from thor_spec.guard.identity import Identity

SYSTEM_DIR = Path("/run/lock/thor-spec")
ADMISSION = "admission"
RESIDENCY = "residency"

WAIT_TICK_S = 0.1
# A new holder writes its record right after locking; a reader in between sees the previous one.
RECORD_WAIT_S = 0.3


class Lock:
    """One held lock. The descriptor is closed on exec; whoever gets a copy of it shares the lock."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    def verify(self) -> None:
        """Check that the path still leads to the locked file; a holder may ask at any time.

        Raises: LockPathError, if the file was removed or replaced: another job can start beside this one.
        """
        held = os.fstat(self.fd)
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except OSError:
            named = None
        if named is None or held.st_nlink < 1 or not os.path.samestat(held, named):
            raise lockpath.refusal(self.path, "the lock file was removed or replaced while in use", lockpath.REPAIR)

    def write(self, record: Identity) -> None:
        """Name the holder inside the file. Failing is harmless: the record is advice, the lock is not."""
        self._write(identity.encode(record))

    def release(self) -> None:
        """Give the lock up, unless a copy of the descriptor lives on elsewhere."""
        if self.fd >= 0:
            self._write(bytes(identity.RECORD_BYTES))
            self.close()

    def close(self) -> None:
        """Close this descriptor and leave the record for those who share the lock."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _write(self, record: bytes) -> None:
        with suppress(OSError):
            os.pwrite(self.fd, record, 0)


@dataclass(frozen=True, slots=True)
class LockDirectory:
    """Where the lock files are: made by an administrator for all users (``system``), or private to one."""

    path: Path
    system: bool

    @classmethod
    def find(cls, *, system: Path = SYSTEM_DIR, private: Path | None = None) -> "LockDirectory":
        """Return the system directory where there is one, else one below ``private`` (default: the runtime directory).

        Creates nothing. An existing system directory is never passed over, however broken: another user may hold it.
        """
        if lockpath.exists(system):
            return cls(system, system=True)
        return cls((private or env.runtime_dir()) / "locks", system=False)

    @property
    def exists(self) -> bool:
        return lockpath.exists(self.path)

    def take(
        self,
        name: str,
        record: Identity | None = None,
        *,
        wait: bool = False,
        give_up: Callable[[], bool] = lambda: False,
        report: Callable[[Identity | None], None] | None = None,
    ) -> Lock:
        """Take one lock and write ``record`` into it.

        Args:
            wait: try until it is free instead of failing.
            give_up: asked while waiting; True ends the wait as if there had been none.
            report: called with the holder, where it is known, whenever a wait finds a new one.

        Raises: BusyError, naming the holder; LockPathError.
        """
        self._prepare()
        reported: set[str | None] = set()
        while True:
            fd = self.open(name)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock = Lock(self.path / name, fd)
                lock.verify()
            except BlockingIOError:
                holder = _holder(fd)
                os.close(fd)
                if not wait or give_up():
                    raise BusyError(_busy(name, holder)) from None
                if report and (who := holder.uuid if holder else None) not in reported:
                    reported.add(who)
                    report(holder)
                time.sleep(WAIT_TICK_S)
                continue
            except BaseException:
                os.close(fd)
                raise
            if record:
                lock.write(record)
            return lock

    def open(self, name: str) -> int:
        """Open a lock file that must exist, and return its descriptor.

        Raises: LockPathError, if it is missing, not a plain file, or closed to this user.
        """
        path = self.path / name
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            try:
                fd = os.open(path, os.O_RDWR | flags)
            except OSError as error:
                if error.errno != errno.EROFS:
                    raise
                fd = os.open(path, os.O_RDONLY | flags)  # flock needs no write access; only the record is lost
        except PermissionError:
            raise lockpath.refusal(self.path, f"no permission to open {name}", self._admittance()) from None
        except FileNotFoundError:
            remedy = "Have the administrator run `systemd-tmpfiles --create`." if self.system else lockpath.REPAIR
            raise lockpath.refusal(self.path, f"the lock file {name} is missing", remedy) from None
        except OSError as error:
            raise lockpath.refusal(path, error.strerror or str(error), lockpath.REPAIR) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise lockpath.refusal(path, "not a plain file", lockpath.REPAIR)
        return fd

    def _admittance(self) -> str:
        if not self.system:
            return f"Run `chmod -R u+rwX {self.path}`."
        gid = os.stat(self.path).st_gid
        try:
            group = grp.getgrgid(gid).gr_name
        except KeyError:
            group = str(gid)
        return f"Join the group {group} (`sudo usermod -aG {group} $USER`, then log in again)."

    def _prepare(self) -> None:
        """Make a private directory on first use; refuse one that is unsafe or damaged."""
        owners = (0, os.getuid()) if self.system else (os.getuid(),)
        if not self.system:
            runtime = self.path.parent
            try:
                with suppress(FileExistsError):
                    runtime.mkdir(mode=0o700, parents=True)
                lockpath.check(runtime, owners=owners)
                if not self.exists:
                    lockpath.create(self.path, (ADMISSION, RESIDENCY), size_bytes=identity.RECORD_BYTES)
            except OSError as error:
                why = f"cannot be used ({error.strerror})"
                raise lockpath.refusal(runtime, why, lockpath.ELSEWHERE) from None
        lockpath.check(self.path, owners=owners, shared=self.system)
        for name in (ADMISSION, RESIDENCY):  # both, whichever is wanted: a holder of the deleted one may live
            os.close(self.open(name))


def _holder(fd: int) -> Identity | None:
    """Return who holds the lock, if the record names a live process."""
    deadline = time.monotonic() + RECORD_WAIT_S
    while True:
        found = identity.read(fd)
        if found and found.is_alive:
            return found
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)


def _busy(name: str, holder: Identity | None) -> str:
    who = holder.describe() if holder else "a process that its record does not name (`thor-spec status` shows more)"
    what = "The device is in use" if name == ADMISSION else "A job whose launcher is gone still occupies the device"
    return f"{what}: held by {who}. One job runs at a time. Stop it with `thor-spec stop`, or wait for its end."
