"""Launchers that start, stop and die in any order never put two jobs on the device."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from thor_spec.guard.locks import LockDirectory
from thor_spec.guard.status import status

from .conftest import PYTHON, Launcher, processes, until

# Every process of the job shares one witness lock, which ends with the last of them: a start that finds it taken has
# met a living process of another job.
ENGINE = """
import fcntl, os, signal, sys, time
witness = os.open(sys.argv[1] + "/witness", os.O_RDWR | os.O_CREAT)
try:
    fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    open(sys.argv[1] + "/collision", "w").close()
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
OUTCOMES: Counter[int] = Counter()


@pytest.mark.parametrize("seed", range(60))
def test_never_two_holders(seed: int, launch: Callable[..., Launcher], locks: LockDirectory, tmp_path: Path) -> None:
    dice = random.Random(seed)
    running: list[Launcher] = []
    launched = []
    for _ in range(dice.randint(4, 8)):
        action = dice.choice(["start", "start", "stop", "kill", "kill engine"])
        if action == "start" and len(running) < 4:
            running.append(launch((*PYTHON, ENGINE, str(tmp_path)), grace_s=dice.choice([0.0, 0.2])))
            launched.append(running[-1])
        elif action == "stop" and running:
            running.pop(dice.randrange(len(running))).order_stop()
        elif action == "kill" and running:
            running.pop(dice.randrange(len(running))).kill()
        elif action == "kill engine" and locks.exists:
            shim = (*status(locks).pids, 0)[0]
            for process in processes.descendants(shim) if shim else []:
                if process.ppid == shim:
                    processes.send(process, signal.SIGKILL)
        time.sleep(dice.choice([0, 0.01, 0.05, 0.1]))
    for launcher in launched:
        launcher.kill()
        OUTCOMES[launcher.hear().get("code", -1)] += 1
    until(lambda: not status(locks).held)
    assert not os.path.exists(tmp_path / "collision")


def test_the_interleavings_were_worth_it() -> None:
    if sum(OUTCOMES.values()) < 60:
        pytest.skip("only part of the seeds ran")
    assert OUTCOMES[0] > 30
    assert OUTCOMES[10] > 10
    assert not set(OUTCOMES) - {-1, 0, 10}
