"""Launchers that start, stop and die in any order never put two jobs on the device."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from thor_spec.errors import BusyError
from thor_spec.guard import orphans, processes
from thor_spec.guard.locks import RESIDENCY, LockDirectory
from thor_spec.guard.status import status

from .conftest import Launcher
from .waiting import PYTHON, until

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


def test_a_thousand_interleavings_of_six_launchers_never_give_two_holders(tmp_path: Path) -> None:
    """The real locks with light processes; the test above runs fewer with the real shim."""
    lanes = []
    for lane in range(2):
        (tmp_path / str(lane)).mkdir()
        arguments = (str(tmp_path / str(lane)), str(500 * lane), "500")
        program = Path(__file__).with_name("interleavings.py")
        lanes.append(subprocess.Popen([sys.executable, program, *arguments], stdout=subprocess.PIPE))
    counted: Counter[str] = Counter()
    for process in lanes:
        counted.update(json.loads(process.communicate()[0]))
        assert process.returncode == 0
    assert counted["C"] == 0  # an engine that met another one
    assert counted["w"] > 500  # starts that won
    assert counted["b"] > 500  # starts that were refused
    assert counted["kill"] > 500


class Lives:
    """The engines of one test, told from others by the odd duration that they sleep."""

    def __init__(self, seed: int) -> None:
        self.token = f"61.{os.getpid()}{seed:04d}"
        # The worker leaves session and group; only its title and its descent tell whose it is.
        worker = f"setsid bash -c 'exec -a VLLM::Worker sleep {self.token}' &"
        self.argv = ("bash", "-c", f"{worker} exec -a VLLM::EngineCore sleep {self.token}")

    def all(self) -> list[tuple[processes.Process, str]]:
        """Return each process with its title; before it takes one, that is the shell's."""
        found = []
        for process in processes.snapshot():
            arguments = processes.arguments(process.pid)
            if process.is_live and any(self.token in argument for argument in arguments):
                found.append((process, arguments[0]))
        return found

    def engines(self) -> list[processes.Process]:
        return [process for process, title in self.all() if title.startswith("VLLM::")]


def is_free(locks: LockDirectory) -> bool:
    try:
        locks.take(RESIDENCY).release()
    except BusyError:
        return False
    return True


def test_two_hundred_killed_launchers_leave_no_live_engine_unnoticed(
    launch: Callable[..., Launcher], locks: LockDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever an engine lives without its launcher, residency is held or the orphan scan names it."""
    monkeypatch.setattr("thor_spec.guard.locks.RECORD_WAIT_S", 0.0)
    met: Counter[str] = Counter()
    for seed in range(1000):
        if seed >= 200 and met["guarded"] > 20 and met["orphan"] > 5:
            break
        dice = random.Random(seed)
        lives = Lives(seed)
        launcher = launch(lives.argv, grace_s=0.0)
        time.sleep(dice.uniform(0, 0.15 * (1 + seed // 200)))  # a slow machine needs later kills to meet everything
        shim = (*status(locks).pids, 0)[0] if dice.random() < 0.25 and locks.exists else 0
        launcher.kill()
        if shim and (process := processes.read(shim)):
            processes.send(process, signal.SIGKILL)  # the worst case: nobody is left to clean up
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            before = lives.engines()
            free = is_free(locks)
            named = {orphan.pid for orphan in orphans.find()} if free and before else set()
            still = [p for p in before if processes.is_same(p)]
            if free and still:
                assert {p.pid for p in still} <= named, f"seed {seed}: an engine lives, and nothing tells"
                met["orphan"] += 1
                for engine in still:
                    processes.send(engine, signal.SIGKILL)
            elif still:
                met["guarded"] += 1
            elif free and not (rest := lives.all()):
                break
            elif free and shim:
                for process, title in rest:
                    if not title.startswith("VLLM::"):  # not an engine yet: the next look would be too late for it
                        processes.send(process, signal.SIGKILL)
        assert not lives.all()
    assert met["guarded"] > 20
    assert met["orphan"] > 5
