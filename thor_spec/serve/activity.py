"""Signs that a job works, whatever it says: bytes, CPU time, compilers, memory, the GPU.

Source: proc_pid_io(5), proc_pid_stat(5).
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from thor_spec.guard.memory import MemorySource
from thor_spec.serve.background import in_thread

COMPILERS = ("nvcc", "ptxas", "cicc", "gcc", "g++", "ninja", "cc1", "clang", "fatbinary", "nvlink")
MEMORY_STEP_BYTES = 64 << 20
CPU_SHARE = 0.1  # of one core; an idle server's timers take less
CPU_WINDOW_S = 1.0
UTILIZATION_TIMEOUT_S = 2.0
UTILIZATION_EVERY_S = 10.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Activity(NamedTuple):
    """Totals of a job at one moment; they never go down, except memory and utilization."""

    log_bytes: int = 0
    read_bytes: int = 0
    cpu_s: float = 0.0
    compilers: bool = False
    available_bytes: int | None = None
    utilization: float | None = None  # percent; None where it cannot be read


class Sign(NamedTuple):
    """What moved between two looks. ``gpu`` stands apart, because a hung kernel shows it too."""

    moved: frozenset[str]
    gpu: bool


class Motion:
    """Tells what moved, one ``Activity`` after the other."""

    def __init__(self) -> None:
        self._last: Activity | None = None
        self._memory_mark: int | None = None
        self._cpu_mark: tuple[float, float] | None = None

    def feed(self, activity: Activity, now_s: float) -> Sign:
        """Take the job's totals at ``now_s`` and return what moved since the last time."""
        last, self._last = self._last, activity
        moved = set()
        if activity.compilers:
            moved.add("compilers")
        if last is not None and activity.log_bytes != last.log_bytes:
            moved.add("log")
        if last is not None and activity.read_bytes > last.read_bytes:
            moved.add("read")
        if (available := activity.available_bytes) is not None:
            if self._memory_mark is None:
                self._memory_mark = available
            elif abs(available - self._memory_mark) > MEMORY_STEP_BYTES:
                self._memory_mark = available
                moved.add("memory")
        if self._cpu_mark is None:
            self._cpu_mark = (now_s, activity.cpu_s)
        elif (elapsed_s := now_s - self._cpu_mark[0]) >= CPU_WINDOW_S:
            if activity.cpu_s - self._cpu_mark[1] >= CPU_SHARE * elapsed_s:
                moved.add("cpu")
            self._cpu_mark = (now_s, activity.cpu_s)
        return Sign(frozenset(moved), bool(activity.utilization))


class ActivityReader:
    """Reads a job's totals from ``/proc``; what ended processes had done stays counted."""

    def __init__(
        self,
        pids: Callable[[], Iterable[int]],
        log_file: Path,
        memory: MemorySource,
        utilization: Callable[[], float | None] | None = None,
    ) -> None:
        self._pids = pids
        self._log_file = log_file
        self._memory = memory
        self._read_utilization = utilization or read_utilization
        self._seen: dict[int, tuple[int, float]] = {}
        self._read_bytes = 0
        self._cpu_s = 0.0
        self._utilization: float | None = None
        self._asked: Future[float | None] | None = None
        self._ask_at = 0.0

    def read(self) -> Activity:
        """Return the totals now."""
        compilers = False
        seen: dict[int, tuple[int, float]] = {}
        for pid in self._pids():
            found = _of_process(pid)
            if found is None:
                continue
            name, read_bytes, cpu_s = found
            before = self._seen.get(pid, (0, 0.0))
            self._read_bytes += max(0, read_bytes - before[0])
            self._cpu_s += max(0.0, cpu_s - before[1])
            seen[pid] = (read_bytes, cpu_s)
            compilers = compilers or name.startswith(COMPILERS)
        self._seen = seen
        log_bytes = 0
        with suppress(OSError):
            log_bytes = self._log_file.stat().st_size
        return Activity(
            log_bytes=log_bytes,
            read_bytes=self._read_bytes,
            cpu_s=self._cpu_s,
            compilers=compilers,
            available_bytes=self._memory.read().available_bytes,
            utilization=self._gpu(),
        )

    def _gpu(self) -> float | None:
        """Return the last known utilization; asking takes a while, so a thread does it."""
        if self._asked is not None and self._asked.done():
            self._utilization = self._asked.result()
            self._asked = None
        if self._asked is None and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + UTILIZATION_EVERY_S
            self._asked = in_thread(self._read_utilization, name="utilization")
        return self._utilization


def read_utilization() -> float | None:
    """Return the GPU's utilization in percent, or None. In a child process: NVML does not survive a fork."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    command = [tool, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=UTILIZATION_TIMEOUT_S
        )
        return max(float(line) for line in done.stdout.split("\n") if line.strip())
    return None


def _of_process(pid: int) -> tuple[str, int, float] | None:
    """Return name, bytes read from storage, and CPU seconds of a process, or None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            head, _, tail = file.read().rpartition(")")
    except OSError:
        return None
    fields = tail.split()
    read_bytes = 0
    with suppress(OSError, ValueError), open(f"/proc/{pid}/io", encoding="ascii") as file:
        read_bytes = next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))
    return head.partition(" (")[2], read_bytes, (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
