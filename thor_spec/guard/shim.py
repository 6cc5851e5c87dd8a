"""The job shim: holds the residency lock for as long as any process of the job lives.

    python -m thor_spec.guard.shim --lock-fd N --parent PID --grace SECONDS [--cgroup DIRECTORY] -- COMMAND...

The launcher may die at any moment, and an engine started with multiprocessing "spawn" does not inherit descriptors, so
neither can hold the lock. The shim can: as a subreaper it adopts every orphan below it, so that "no child left" means
"no descendant left", whatever sessions they made. Only then it exits and the kernel releases the lock.

It ends the job when asked to, when the launcher dies, and when the command's first process ends with others left.
Exit status: the command's own, or 128 plus its signal. Nothing is written to stderr after the command has started: a
full pipe must not stop the one process that can stop the job.

Source: PR_SET_CHILD_SUBREAPER(2const), PR_SET_PDEATHSIG(2const), sigtimedwait(2), flock(2).
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

from thor_spec.guard import cgroup, processes

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
# Signals of one kind merge while pending, so "at once" needs a kind of its own.
KILL_NOW = signal.SIGUSR2
PARENT_DIED = signal.SIGUSR1
# The launcher blocks these around the start of the shim: none is lost before the shim is ready to take it.
SIGNALS = STOP_SIGNALS | {KILL_NOW, PARENT_DIED, signal.SIGCHLD}

IDLE_TICK_S = 1.0
KILL_TICK_S = 0.05
OOM_SCORE = b"500"  # should the kernel choose a victim, let it be the engine
KILL_PATIENCE_S = 5.0  # what survived SIGKILL for this long waits inside the kernel


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _volunteer() -> None:
    """Make this process the kernel's first choice when memory runs out; raising one's own score is always allowed."""
    with suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, OOM_SCORE)
        finally:
            os.close(fd)


def _spawn(command: list[str], cgroup_path: str | None) -> int:
    """Start the command in a process group of its own, and in the job's cgroup if there is one; return its pid."""
    shim = os.getpid()
    if pid := os.fork():
        return pid
    failed = 126  # as a shell has it
    try:
        # A killed shim frees the lock, so it must not leave the command behind.
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim:
            os._exit(128 + signal.SIGKILL)
        os.setpgid(0, 0)
        if cgroup_path:
            cgroup.enter(cgroup_path)
        _volunteer()
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores them, and exec would keep that
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)
    except OSError as error:
        failed = 127 if isinstance(error, FileNotFoundError) else failed
        os.write(2, f"thor-spec: cannot run {command[0]}: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(failed)  # whatever happened, a second shim must not come of it


def _signal_all(signum: int) -> None:
    """Signal every descendant once; repeat the scan until it finds none that is new."""
    signalled: set[tuple[int, int]] = set()
    while True:
        found = [p for p in processes.descendants(os.getpid()) if p.is_live]
        fresh = [p for p in found if (p.pid, p.start_ticks) not in signalled]
        if not fresh:
            return
        for process in fresh:
            signalled.add((process.pid, process.start_ticks))
            with suppress(PermissionError):  # a set-user-ID program: it is waited for, not killed
                processes.send(process, signum)


def _reap(first: int) -> tuple[bool, int | None]:
    """Collect ended children; return whether any is left, and the exit status of ``first`` if it was among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, code
        if pid == 0:
            return True, code
        if pid == first:
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else 128 - ended


def _tick_s(kill_at: float | None, now: float) -> float:
    """Return how long to wait for a signal; the ends of children are signals too."""
    if kill_at is None or now > kill_at + KILL_PATIENCE_S:
        return IDLE_TICK_S
    return min(IDLE_TICK_S, max(KILL_TICK_S, kill_at - now))


def supervise(command: list[str], *, lock_fd: int, parent: int, grace_s: float, cgroup_path: str | None = None) -> int:
    """Run the command to the end of its last descendant and return its exit status; the lock stays held throughout."""
    with suppress(PermissionError):  # the launcher has made the session already
        os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would reap behind our back
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.set_inheritable(lock_fd, False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, PARENT_DIED)
    if os.getppid() != parent:
        if cgroup_path:
            cgroup.remove(cgroup_path)
        return 128 + signal.SIGTERM  # the launcher died before its death could be signalled

    first = _spawn(command, cgroup_path)
    exit_status: int | None = None
    asked = 0
    kill_at: float | None = None  # set once the job is being stopped
    while True:
        received = signal.sigtimedwait(SIGNALS, _tick_s(kill_at, time.monotonic()))
        signum = received.si_signo if received else None
        children_left, code = _reap(first)
        exit_status = exit_status if code is None else code
        if not children_left:
            if cgroup_path:
                cgroup.remove(cgroup_path)
            return exit_status if exit_status is not None else 1

        asked += signum in STOP_SIGNALS
        # The signal comes at the end of the thread that started us; only the parent's pid tells whether it died.
        if kill_at is None and (asked or signum == KILL_NOW or exit_status is not None or os.getppid() != parent):
            _signal_all(signal.SIGTERM)
            kill_at = time.monotonic() + grace_s
        if kill_at is not None and (asked > 1 or signum == KILL_NOW):
            kill_at = min(kill_at, time.monotonic())
        if kill_at is not None and time.monotonic() >= kill_at:
            if cgroup_path:
                cgroup.kill(cgroup_path)
            _signal_all(signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Run the shim; options come in pairs, and the command follows ``--``."""
    split = arguments.index("--")
    options = dict(zip(arguments[:split:2], arguments[1:split:2], strict=True))
    return supervise(
        arguments[split + 1 :],
        lock_fd=int(options["--lock-fd"]),
        parent=int(options["--parent"]),
        grace_s=float(options["--grace"]),
        cgroup_path=options.get("--cgroup"),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
