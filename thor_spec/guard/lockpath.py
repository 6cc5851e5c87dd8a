"""The place of the lock files: refuse what somebody else could redirect, and make a private one on first use."""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from thor_spec.errors import LockPathError

REPAIR = "See with `ps` that no engine runs, then remove the whole directory; the next start makes it anew."
ELSEWHERE = "Name another directory in THOR_SPEC_RUNTIME_DIR."


def refusal(path: Path, why: str, remedy: str) -> LockPathError:
    """Return the error for this path: what is wrong, why that stops a start, and what to do."""
    return LockPathError(f"{path}: {why}. Two jobs could start on one device, so none does. {remedy}")


def exists(path: Path) -> bool:
    """Return whether there is anything at this path, be it a dangling link.

    Raises: LockPathError, where that cannot be told; "not there" would be the wrong answer.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise refusal(path, f"cannot be looked at ({error.strerror})", "See to the permissions above it.") from None
    return True


def check(path: Path, *, owners: tuple[int, ...], shared: bool = False) -> None:
    """Refuse a directory in which somebody else could replace our files.

    Raises: LockPathError.
    """
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        raise refusal(path, "a symbolic link, which can be redirected", ELSEWHERE)
    if not stat.S_ISDIR(info.st_mode):
        raise refusal(path, "not a directory", ELSEWHERE)
    if info.st_uid not in owners:
        raise refusal(path, f"owned by uid {info.st_uid}, not by uid {owners[-1]}", ELSEWHERE)
    if not shared and info.st_mode & 0o022:
        raise refusal(path, "writable by other users", f"Run `chmod 700 {path}`.")


def create(path: Path, names: Iterable[str], *, size_bytes: int) -> None:
    """Make a directory with preallocated files, unless another launcher is first.

    It is made aside and moved into place whole: a directory without its files is damaged, never half made.
    """
    fresh = tempfile.mkdtemp(prefix="locks-", dir=path.parent)
    try:
        for name in names:
            fd = os.open(os.path.join(fresh, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(fd, 0, size_bytes)  # a full disk must not lose the record later
            finally:
                os.close(fd)
        os.rename(fresh, path)
    except OSError as error:
        shutil.rmtree(fresh)
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
