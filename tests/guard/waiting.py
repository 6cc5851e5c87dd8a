"""Waiting for what a test is about, without a sleep that has to be long enough."""

import sys
import time
from collections.abc import Callable
from typing import Any

from thor_spec.guard import processes

# Without site: these programs only stand in for an engine, and dozens of them start.
PYTHON = (sys.executable, "-I", "-S", "-c")


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Return the first true value of ``condition``; fail when none comes in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.005)
    return value


def alive(pid: int) -> bool:
    process = processes.read(pid)
    return process is not None and process.is_live
