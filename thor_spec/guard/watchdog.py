"""The watchdog: a process of its own that kills the job before it can take the board along.

    python -m thor_spec.guard.watchdog --socket FD --root PID --root-ticks N --root-is shim|container
        --supervisor PID --supervisor-ticks N --grace SECONDS --floor BYTES [--cgroup DIRECTORY] [--kernel-log FD]
        --state DIRECTORY --job JSON ...

It holds no lock, needs no other program, and locks itself into memory where it may. Memory triggers kill at once; the
death of the supervisor starts the full order: SIGTERM, the grace, SIGKILL. It tells the supervisor of every poll, so
that its own death is noticed. Signals go through a pidfd to the very processes that it was given.

Messages are JSON, one per packet. To the supervisor: ``notices`` once, then ``available`` per poll, and ``trigger`` or
``warning``. From it: ``phase``, and ``bye`` to end.

Source: mlock(2), proc_pid_oom_score_adj(5), pidfd_open(2), /dev/kmsg in Documentation/ABI/testing/dev-kmsg.
"""

import ctypes
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from thor_spec.guard import processes, sensors, shim, state
from thor_spec.guard.members import Members
from thor_spec.guard.memory import ProcMemory
from thor_spec.guard.processes import Process
from thor_spec.guard.triggers import HOT_MILLIDEGREES, Trigger, Triggers

POLL_S = 0.25
CENSUS_S = 5.0
SENSORS_S = 10.0
RECORD_WAIT_S = 0.05  # a blocked disk must not hold up a kill
KILL_WAIT_S = 60.0
SHIM_LEAD_S = 1.0  # the shim kills at the end of the grace; we follow if it could not
MEMORY_KILL_CODE = 30
LAUNCHER_DIED = "launcher died"
SHIM, CONTAINER = "shim", "container"  # what the root of the job's processes is

_MCL_CURRENT, _MCL_FUTURE = 1, 2
_STACK_BYTES = 256 << 10  # locked memory: the default of 8 MiB would be taken whole
_KMSG_BYTES = 8192
_KMSG_PREFIX = re.compile(r"^\d+,\d+,\d+,[^;]*;")
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


def shield() -> list[str]:
    """Keep this process alive and in memory when memory is short; return what was not permitted, a line each."""
    notices = []
    or_root = ", or run as root" if os.geteuid() else ""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_MCL_CURRENT | _MCL_FUTURE) != 0:
        why = os.strerror(ctypes.get_errno())
        notices.append(f"watchdog not locked into memory ({why}): it may react late. Raise LimitMEMLOCK{or_root}.")
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"-1000")
        finally:
            os.close(fd)
    except OSError as error:
        notices.append(
            f"watchdog not exempt from the OOM killer ({error.strerror}): the kernel may choose it as a victim. "
            f"Grant CAP_SYS_RESOURCE{or_root}."
        )
    return notices


class Recorder:
    """Writes the stop record in a thread that exists beforehand, so that a blocked disk blocks nothing else."""

    def __init__(self, directory: Path) -> None:
        self._store = state.StateStore(directory)
        self._queue: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._written = threading.Event()
        threading.stack_size(_STACK_BYTES)
        threading.Thread(target=self._write, daemon=True).start()

    def record(self, fields: dict[str, Any], *, wait_s: float) -> None:
        """Hand a record over, and wait for it to be written, at most ``wait_s``."""
        self._written.clear()
        self._queue.put(fields)
        self._written.wait(wait_s)

    def _write(self) -> None:
        while True:
            fields = self._queue.get()
            with suppress(OSError):
                self._store.write(state.stamped({**fields, "log_tail": state.last_lines(fields.get("log_file"))}))
            self._written.set()


class Watch:
    """One job under watch, from the first poll to its end or ``bye``."""

    def __init__(self, options: dict[str, str]) -> None:
        self._socket = socket.socket(fileno=int(options["--socket"]))
        self._socket.setblocking(False)
        self._kernel_log = int(options["--kernel-log"]) if "--kernel-log" in options else None
        self._grace_s = float(options["--grace"])
        self._root = _process(options, "--root")
        has_shim = options["--root-is"] == SHIM
        self._members = Members(self._root, options.get("--cgroup"), has_shim=has_shim)
        self._job: dict[str, Any] = json.loads(options["--job"])
        self._memory = ProcMemory(Path(options["--meminfo"]), Path(options["--pressure"]))
        self._triggers = Triggers(int(options["--floor"]))
        self._recorder = Recorder(Path(options["--state"]))
        self._supervisor = _open(_process(options, "--supervisor"))
        self._began = time.monotonic()
        self._margin: int | None = None
        self._least: int | None = None
        self._trigger: Trigger | None = None
        self._kill_at: float | None = None  # set once the supervisor is dead
        self._over_current: int | None = None
        self._hot = False

    def run(self, notices: list[str]) -> int:
        """Watch until told to end, or until the job of a dead supervisor is gone."""
        if not self._memory.has_pressure:
            notices.append("no /proc/pressure/memory: stalls are not seen early, the floor and the slope still guard.")
        if self._kernel_log is None:
            notices.append("the kernel log cannot be read: NV_ERR_NO_MEMORY goes unnoticed. Allow /dev/kmsg.")
        self._say(notices=notices)
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        if self._supervisor is not None:
            waiting.register(self._supervisor, select.POLLIN)
        next_poll = next_census = next_sensors = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= next_poll:
                self._poll()
                next_poll = max(next_poll + POLL_S, now)  # no burst after a sleep
            if now >= next_census:
                self._members.census()  # whom the shim loses when it is killed, we still know
                next_census = now + CENSUS_S
            if now >= next_sensors:
                self._warn_of_heat()
                next_sensors = now + SENSORS_S
            if self._kill_at is not None and self._wind_up():
                return 0
            ready = {fd: event for fd, event in waiting.poll(max(0.0, next_poll - time.monotonic()) * 1000)}
            if self._socket.fileno() in ready and not self._listen():
                waiting.unregister(self._socket)
                if self._left():
                    return 0
            if self._kill_at is None and (self._supervisor is None or self._supervisor in ready):
                if self._supervisor is not None:
                    waiting.unregister(self._supervisor)
                self._orphaned()

    def _poll(self) -> None:
        reading = self._memory.read()
        trigger = self._triggers.judge(reading) or self._read_kernel_log()
        self._margin = reading.available_bytes - self._triggers.floor_bytes
        self._least = self._margin if self._least is None else min(self._least, self._margin)
        if self._trigger is not None:
            self._kill()  # whoever was born meanwhile
        elif trigger is not None:
            self._trigger = trigger
            self._say(trigger=trigger._asdict())  # memory only: it cannot block
            self._record(f"memory guard: {trigger.describe()}", MEMORY_KILL_CODE, wait_s=RECORD_WAIT_S)
            self._kill()
        self._say(available=reading.available_bytes)

    def _kill(self) -> None:
        self._members.kill()
        if self._members.has_shim:
            # Not killed itself: it holds the lock until everybody is gone, and collects them.
            self._signal_root(shim.KILL_NOW)
            self._signal_root(signal.SIGCONT)

    def _orphaned(self) -> None:
        """The supervisor died: begin the full order. A shim has seen it too, unless it is stopped or dead."""
        self._kill_at = time.monotonic() + self._grace_s + SHIM_LEAD_S
        members = self._members.census()
        if not self._signal_root(signal.SIGTERM):
            for process in members:
                with suppress(PermissionError):
                    processes.send(process, signal.SIGTERM)
        self._signal_root(signal.SIGCONT)
        self._record(LAUNCHER_DIED, None, wait_s=0)

    def _wind_up(self) -> bool:
        """Carry the full order on; return whether it is done."""
        now = time.monotonic()
        assert self._kill_at is not None
        if not processes.is_same(self._root) and not self._members.census():
            return True
        if now >= self._kill_at:
            self._kill()
        if now >= self._kill_at + KILL_WAIT_S:
            living = self._members.census() or [self._root]
            left = ", ".join(f"pid {process.pid} (state {process.state})" for process in living)
            self._record(f"{LAUNCHER_DIED}; still alive after SIGKILL: {left}. Reboot the board.", None, wait_s=1.0)
            return True
        return False

    def _listen(self) -> bool:
        """Take what the supervisor says; return False once there is nothing more to hear."""
        while True:
            try:
                packet = self._socket.recv(65536)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not packet:
                return False  # its death shows in the pidfd, a moment later: an end without "bye" is no end
            said = json.loads(packet)
            self._job["phase"] = said.get("phase", self._job.get("phase", ""))
            if said.get("bye"):
                self._job["bye"] = True
                return False

    def _left(self) -> bool:
        return bool(self._job.pop("bye", False))

    def _say(self, **what: Any) -> None:
        with suppress(OSError):  # nobody listens, or nobody has read for long: the kill does not depend on it
            self._socket.send(json.dumps(what).encode())

    def _signal_root(self, signum: int) -> bool:
        try:
            return processes.send(self._root, signum)
        except PermissionError:
            return False

    def _record(self, cause: str, code: int | None, *, wait_s: float) -> None:
        fields = {name: value for name, value in self._job.items() if name != "bye"}
        trigger = self._trigger._asdict() if self._trigger else None
        self._recorder.record(
            {
                **fields,
                "cause": cause,
                "exit_code": code,
                "trigger": trigger,
                "margin_bytes": self._margin,
                "least_margin_bytes": self._least,
                "uptime_s": round(time.monotonic() - self._began, 1),
            },
            wait_s=wait_s,
        )

    def _read_kernel_log(self) -> Trigger | None:
        """Read what the kernel logged since the last poll; a device gives one record per read."""
        found = None
        while self._kernel_log is not None and found is None:
            try:
                text = os.read(self._kernel_log, _KMSG_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # records were overwritten before we came; the next read goes on behind them
            except OSError:
                self._kernel_log = None
                break
            if not text:
                break
            for line in text.decode(errors="replace").splitlines():
                found = found or self._triggers.kernel_line(_KMSG_PREFIX.sub("", line))
        return found

    def _warn_of_heat(self) -> None:
        heat = sensors.read()
        hot = heat.tj_millidegrees is not None and heat.tj_millidegrees >= HOT_MILLIDEGREES
        if hot and not self._hot:
            self._say(warning=f"the chip is at {heat.tj_millidegrees} m°C and will throttle. Check fan and airflow.")
        self._hot = hot
        before, self._over_current = self._over_current, heat.over_current_events
        if before is not None and self._over_current is not None and self._over_current > before:
            self._say(warning=f"{self._over_current - before} over-current events: clocks drop. Check power supply.")


def _process(options: dict[str, str], name: str) -> Process:
    return Process(int(options[name]), 0, 0, "S", int(options[f"{name}-ticks"]), "")


def _open(process: Process) -> int | None:
    """Return a pidfd of this very process, or None when it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if processes.is_same(process):
        return fd
    os.close(fd)
    return None


def main(arguments: list[str]) -> int:
    """Run the watchdog; options come in pairs."""
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    watch = Watch(dict(zip(arguments[::2], arguments[1::2], strict=True)))
    return watch.run(shield())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
