"""First process of a container: takes the residency lock, then becomes the command.

    python3 -m thor_spec.guard.entrypoint [--lock PATH] -- COMMAND...

The launcher bind-mounts the lock file, and this file beside it, so that an image needs Python and nothing of ours. The
lock is taken before the command exists: nothing can touch the device first. The descriptor survives exec, so the lock
lasts as long as the container's first process and whatever shares the descriptor with it.

Standard library only, and no import of ours: it also runs as a single file. Exit status: the command's own; 10 if the
lock is taken, 14 if it is missing or not to be trusted, 2 for wrong usage, 126 or 127 if the command cannot run.

Source: flock(2), open(2): a lock needs neither write access nor a writable mount.
"""

import fcntl
import os
import stat
import sys

LOCK = "/run/thor-spec/residency"

USAGE, BUSY, LOCK_PATH, CANNOT_RUN, NOT_FOUND = 2, 10, 14, 126, 127
# Entry scripts of images like to redirect the low numbers, and a descriptor that is redirected is a lock that is lost.
LOWEST_FD = 100


class Refusal(Exception):
    """Why the command is not started; ``code`` is the exit status."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def take(path: str) -> int:
    """Lock the file without waiting, and return an inheritable descriptor.

    Raises: Refusal, if another job holds it, or if holding it would exclude nobody.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Refusal(
            LOCK_PATH,
            f"The residency lock {path} cannot be opened ({error.strerror}), so two jobs could share the device. "
            "Start the container with `thor-spec run --container`, which mounts it.",
        ) from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise Refusal(LOCK_PATH, f"{path} is not a plain file. Mount the lock file itself, not a directory.")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refusal(BUSY, f"The device is in use: {path} is held by another job. One job runs at a time.") from None
    # A mount keeps showing a file that was deleted on the host; only its link count tells.
    if os.fstat(fd).st_nlink < 1 or not os.path.samestat(info, os.stat(path)):
        raise Refusal(
            LOCK_PATH,
            f"{path} was deleted or replaced on the host, so locking it excludes nobody. "
            "Have the administrator run `thor-spec doctor --fix-lock-dir`.",
        )
    high = fcntl.fcntl(fd, fcntl.F_DUPFD, LOWEST_FD)
    os.close(fd)
    return high


def main(arguments: list[str]) -> int:
    """Lock, and become the command; returns an exit status only when that failed."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = arguments[:split], arguments[split + 1 :]
    path = LOCK
    if options[:1] == ["--lock"] and len(options) == 2:
        path, options = options[1], []
    try:
        if options or not command:
            raise Refusal(USAGE, "usage: entrypoint [--lock PATH] -- COMMAND [ARGS]...")
        take(path)
    except Refusal as refusal:
        sys.stderr.write(f"thor-spec: {refusal}\n")
        return refusal.code
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"thor-spec: cannot run {command[0]}: {error.strerror}\n")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
