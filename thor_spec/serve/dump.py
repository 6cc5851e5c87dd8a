"""What can be learned from a stalled engine before it is stopped: stacks, kernel log, its own log."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from thor_spec.guard import processes, state
from thor_spec.guard.watchdog_handle import KERNEL_LOG

LOG_LINES = 200
STACK_TIMEOUT_S = 10.0
STACKS = 8
KEPT = 5
_RECORD_BYTES = 8192


def take(directory: Path, pids: Iterable[int], log_file: Path, *, reason: str) -> Path:
    """Write a dump below ``directory`` and return its folder; the last few are kept.

    Raises: OSError, if nothing can be written there.
    """
    root = directory / "dumps"
    folder = root / f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
    folder.mkdir(mode=0o700, parents=True)
    (folder / "reason").write_text(reason + "\n", encoding="utf-8")
    (folder / "log").write_text("\n".join(state.last_lines(log_file, LOG_LINES, block_bytes=1 << 20)) + "\n")
    (folder / "kernel-log").write_text("\n".join(_kernel_log()[-LOG_LINES:]) + "\n", encoding="utf-8")
    (folder / "stacks").write_text("\n\n".join(_stacks(pid) for pid in list(pids)[:STACKS]) + "\n", encoding="utf-8")
    for old in sorted(root.iterdir())[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _stacks(pid: int) -> str:
    """Return what a process is doing: its Python stacks if py-spy is there, and where it waits in the kernel."""
    parts = [f"# pid {pid}: {' '.join(processes.arguments(pid))[:200]}"]
    for name in ("wchan", "stack", "status"):
        with suppress(OSError):
            parts.append(f"{name}: {Path(f'/proc/{pid}/{name}').read_text(errors='replace')}")
    if tool := shutil.which("py-spy"):
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [tool, "dump", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=STACK_TIMEOUT_S,
            )
            parts.append(done.stdout)
    return "\n".join(parts)


def _kernel_log() -> list[str]:
    """Return the kernel log, one record per read; empty where it is closed to this user."""
    lines: list[str] = []
    with suppress(OSError):
        fd = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while True:
                try:
                    lines.append(os.read(fd, _RECORD_BYTES).decode(errors="replace").partition("\n")[0])
                except BrokenPipeError:
                    continue  # overwritten meanwhile; the next read goes on behind
        finally:
            os.close(fd)
    return lines
