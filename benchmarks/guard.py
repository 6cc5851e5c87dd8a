"""What the guard costs and how fast it acts.

    .venv/bin/python benchmarks/guard.py [--repetitions 7] [--idle-seconds 20]

Four figures: the time from the request for a held lock to the refusal that names its holder; the CPU time of the idle
watchdog; the time from the crossing of the memory floor to the death of the last process (MemAvailable is a file here
and falls by 2 GiB/s); and ``status`` with the start of the interpreter, while a job runs. Exits 1 when a median
is above its limit.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import summary, write

from thor_spec.errors import BusyError, MemoryGuardError
from thor_spec.guard import processes
from thor_spec.guard.guarded import GuardedJob, Settings
from thor_spec.guard.locks import ADMISSION, LockDirectory
from thor_spec.guard.memory import GIB
from thor_spec.guard.watchdog_handle import Sources

GROWTH_BYTES_PER_S = 2 * GIB
FLOOR_BYTES = 4 * GIB
ENGINE = (sys.executable, "-I", "-S", "-c", "import os, signal, time\nsignal.signal(15, signal.SIG_IGN)\n")
FAMILY = "[os.fork() for _ in range(3)]\ntime.sleep(600)\n"
LIMITS = {"refusal_ms": 100.0, "idle_cpu_percent": 0.5, "kill_s": 1.0, "status_ms": 200.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    options = parser.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in LIMITS}
    samples["slope_kill_before_floor_gib"] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["THOR_SPEC_RUNTIME_DIR"] = f"{folder}/run"
        os.environ["THOR_SPEC_STATE_DIR"] = f"{folder}/state"
        with guarded(("sleep", "600")) as job:
            for _ in range(options.repetitions):
                samples["refusal_ms"].append(1000 * refusal())
                samples["status_ms"].append(1000 * status())
                samples["idle_cpu_percent"].append(idle_cpu(job, options.idle_seconds))
        for index in range(options.repetitions):
            samples["kill_s"].append(kill(Path(folder) / f"cross{index}", from_bytes=FLOOR_BYTES + GIB // 8))
            before = kill(Path(folder) / f"slope{index}", from_bytes=11 * GIB)
            samples["slope_kill_before_floor_gib"].append(-before * GROWTH_BYTES_PER_S / GIB)
    result = {name: summary(values) for name, values in samples.items()}
    print(f"{'':28} {'median':>9} {'min':>9} {'max':>9}  limit")
    for name, figures in result.items():
        limit = f"{LIMITS[name]:g}" if name in LIMITS else "-"
        print(f"{name:28} {figures['median']:>9} {figures['min']:>9} {figures['max']:>9}  {limit}")
    print(write("guard", {"samples": samples, "summary": result, "limits": LIMITS}))
    if missed := [name for name, limit in LIMITS.items() if result[name]["median"] > limit]:
        raise SystemExit(f"above the limit: {', '.join(missed)}")


def guarded(argv: tuple[str, ...], sources: Sources | None = None) -> GuardedJob:
    settings = Settings(sources=sources or Sources(), floor_bytes=FLOOR_BYTES if sources else 0)
    job = GuardedJob.start(argv, settings=settings, notice=lambda _: None, find_orphans=tuple, grace_s=0.0)
    while not job.watchdog.beats:
        job.check()
        time.sleep(0.002)
    return job


def wait_for(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.002)


def refusal() -> float:
    """Return the seconds from the request for a held lock to the refusal that names the holder."""
    began = time.perf_counter()
    try:
        LockDirectory.find().take(ADMISSION)
    except BusyError:
        return time.perf_counter() - began
    raise SystemExit("the lock was free")


def status() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "thor_spec", "status"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def idle_cpu(job: GuardedJob, seconds: float) -> float:
    """Return the percent of one core that the watchdog takes while nothing happens."""
    pid = job.watchdog.pid
    before, began = cpu_ns(pid), time.monotonic()
    while time.monotonic() - began < seconds:
        job.check()
        time.sleep(0.1)
    if job.watchdog.pid != pid:
        raise SystemExit("the watchdog was replaced meanwhile")
    return 100 * (cpu_ns(pid) - before) / 1e9 / (time.monotonic() - began)


def cpu_ns(pid: int) -> int:
    """Return the time on a core of all threads; /proc/PID/stat counts in ticks of 10 ms, which is too coarse here."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())


def kill(folder: Path, *, from_bytes: int) -> float:
    """Return the seconds from the crossing of the floor to the death of the last process; negative before it."""
    folder.mkdir()
    sources = Sources(meminfo=folder / "meminfo", pressure=folder / "none", kernel_log=folder / "none")
    meminfo = os.open(sources.meminfo, os.O_RDWR | os.O_CREAT)

    def set_available(size: float) -> None:
        kib = max(0, int(size)) // 1024
        os.pwrite(meminfo, f"MemTotal:       128790100 kB\nMemAvailable:   {kib:>9} kB\n".encode(), 0)

    set_available(from_bytes)
    job = guarded((*ENGINE[:-1], ENGINE[-1] + FAMILY), sources)
    wait_for(lambda: len(job.job.pids()) >= 8)
    engines = [process for pid in job.job.pids() if (process := processes.read(pid))]
    time.sleep(2.5)  # a full window of calm readings
    falls_from = time.monotonic()
    crosses_at = falls_from + (from_bytes - FLOOR_BYTES) / GROWTH_BYTES_PER_S
    done = threading.Event()

    def fall() -> None:
        while not done.is_set():
            set_available(from_bytes - (time.monotonic() - falls_from) * GROWTH_BYTES_PER_S)
            time.sleep(0.005)

    thread = threading.Thread(target=fall)
    thread.start()
    wait_for(lambda: not any(processes.is_same(engine) for engine in engines))
    died_at = time.monotonic()
    done.set()
    thread.join()
    set_available(from_bytes)
    try:
        while True:
            job.check()
            time.sleep(0.002)
    except MemoryGuardError:
        job.job.kill()
    job.watchdog.close()
    job.job.close()
    os.close(meminfo)
    return died_at - crosses_at


if __name__ == "__main__":
    main()
