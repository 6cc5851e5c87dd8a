"""Who holds the device, and how to end it from another terminal. Looking takes no lock.

Source: proc_locks(5), pidfd_send_signal(2).
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from thor_spec.errors import BusyError, LockPathError, OrphanError, PlatformError
from thor_spec.guard import identity, memory, processes, sensors
from thor_spec.guard.identity import Identity
from thor_spec.guard.locks import ADMISSION, RECORD_WAIT_S, RESIDENCY, LockDirectory

STOP_TIMEOUT_S = 120.0
POLL_TICK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The device at one moment. ``stale`` says that the record names a process which is gone."""

    schema: int = 1
    lock_dir: str
    admission_held: bool
    residency_held: bool
    holder: Identity | None  # the launcher, or the shim when only the job is left; None when unknown
    stale: bool
    pids: tuple[int, ...]  # the shim and the live processes below it
    margin_bytes: int | None = None  # MemAvailable above the floor that the watchdog defends
    uptime_s: float | None = None
    last_token_s: float | None = None  # seconds since the engine was seen to make progress; None: not seen yet
    throttled: bool | None = None  # None: the machine does not tell

    @property
    def held(self) -> bool:
        return self.admission_held or self.residency_held

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "held": self.held}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What a stop did: ``holder`` is None when nothing ran; ``free`` says whether it is gone now."""

    holder: Identity | None
    free: bool


def flocks(text: str) -> dict[tuple[int, int, int], int]:
    """Return the pid that took each held flock, by major, minor and inode, from the text of ``/proc/locks``."""
    found = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK":  # a waiter has "->" there
            major, minor, inode = fields[5].split(":")
            found[int(major, 16), int(minor, 16), int(inode)] = int(fields[4])
    return found


def locked_inodes(text: str) -> set[tuple[int, int, int]]:
    """Return major, minor and inode of each flock that is held, from the text of ``/proc/locks``."""
    return set(flocks(text))


def taken_by(directory: LockDirectory, name: str) -> int | None:
    """Return the pid of the process that took a lock, maybe dead by now; None when the kernel's table shows none.

    Raises: LockPathError.
    """
    fd = directory.open(name)
    try:
        info = os.fstat(fd)
    finally:
        os.close(fd)
    return flocks(_table()).get((os.major(info.st_dev), os.minor(info.st_dev), info.st_ino))


def _table() -> str:
    with open("/proc/locks", encoding="ascii") as file:
        return file.read()


def _look(directory: LockDirectory, name: str) -> tuple[bool, Identity | None]:
    fd = directory.open(name)
    try:
        info = os.fstat(fd)
        record = identity.read(fd)
    finally:
        os.close(fd)
    held = locked_inodes(_table())
    return (os.major(info.st_dev), os.minor(info.st_dev), info.st_ino) in held, record


def status(locks: LockDirectory | None = None) -> Status:
    """Return who holds what.

    Raises: LockPathError, if the lock files are there and closed to this user, or damaged.
    """
    directory = locks or LockDirectory.find()
    if not directory.exists:
        return Status(
            lock_dir=str(directory.path), admission_held=False, residency_held=False, holder=None, stale=False, pids=()
        )
    admission_held, launcher = _look(directory, ADMISSION)
    residency_held, resident = _look(directory, RESIDENCY)
    # The kernel files a lock under the process that took it, the launcher. Inside a pid namespace the line vanishes
    # with that process although the shim holds on; a live shim always holds.
    residency_held = residency_held or (resident is not None and resident.is_alive)
    record = launcher if admission_held or not residency_held else resident
    alive = record is not None and record.is_alive
    pids: tuple[int, ...] = ()
    if resident and (job := resident.process):
        pids = (job.pid, *(p.pid for p in processes.descendants(job.pid) if p.is_live))
    holder = record if alive and (admission_held or residency_held) else None
    return Status(
        lock_dir=str(directory.path),
        admission_held=admission_held,
        residency_held=residency_held,
        holder=holder,
        stale=record is not None and not alive,
        pids=pids,
        **(_vitals(holder) if holder else {}),
    )


def _vitals(holder: Identity) -> dict[str, Any]:
    margin = None
    if holder.floor_bytes is not None:
        with suppress(PlatformError, OSError):
            margin = memory.ProcMemory().read().available_bytes - holder.floor_bytes
    now = time.monotonic()
    up_since_boot_s = holder.start_ticks / os.sysconf("SC_CLK_TCK")
    return {
        "margin_bytes": margin,
        "uptime_s": round(time.clock_gettime(time.CLOCK_BOOTTIME) - up_since_boot_s, 1),
        "last_token_s": None if holder.token_at_s is None else round(max(0.0, now - holder.token_at_s), 1),
        "throttled": sensors.read().throttled,
    }


def stop(locks: LockDirectory | None = None, *, now: bool = False, timeout_s: float = STOP_TIMEOUT_S) -> Stopped:
    """Ask the holder to end and wait until both locks are free.

    Args:
        now: send a second signal, which skips the grace.
        timeout_s: seconds to wait; the answer says whether it sufficed.

    Raises: LockPathError, if the job belongs to another user; BusyError, if no record names the holder; OrphanError,
        for a container whose launcher is gone.
    """
    directory = locks or LockDirectory.find()
    named_by = time.monotonic() + RECORD_WAIT_S
    while (first := status(directory)).held and first.holder is None and time.monotonic() < named_by:
        time.sleep(POLL_TICK_S)
    if not first.held:
        return Stopped(holder=None, free=True)
    holder = first.holder
    process = holder.process if holder else None
    if holder is None or process is None:
        raise BusyError(
            f"{first.lock_dir} is locked, and its record names no live process, so there is nobody to signal safely. "
            "Try again in a moment, or look for the holder with `lslocks`."
        )
    if holder.container and not first.admission_held:
        # Its first process may be deaf to a plain SIGTERM, as every first process of a pid namespace is.
        raise OrphanError(
            f"Container {holder.container[:12]} runs without its launcher: {holder.describe()}. "
            "End it with `thor-spec reap --yes`."
        )
    try:
        processes.send(process, signal.SIGTERM)
        if now:
            processes.send(process, signal.SIGINT)  # another kind: two of one kind merge while pending
    except PermissionError:
        raise LockPathError(
            f"The job belongs to another user and cannot be stopped by uid {os.getuid()}: {holder.describe()}. "
            "Ask its owner, or use sudo."
        ) from None
    deadline = time.monotonic() + timeout_s
    while True:
        current = status(directory)
        if not current.held or (current.holder and current.holder.uuid != holder.uuid):
            return Stopped(holder=holder, free=True)
        if time.monotonic() > deadline:
            return Stopped(holder=holder, free=False)
        time.sleep(POLL_TICK_S)
