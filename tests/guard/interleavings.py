"""Random interleavings of light launchers on the real locks; run as a program, because it forks thousands of times.

    interleavings.py DIRECTORY FIRST_SEED COUNT

A launcher takes admission and residency as ``Job.start`` does and hands residency to a child that stands in for shim
and engine: it ends a moment after the launcher asks or dies. Every such child also tries a witness lock of its own; one
that finds it taken has met another job. Prints what happened as JSON.
"""

import contextlib
import fcntl
import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from thor_spec.errors import BusyError
from thor_spec.guard import identity, locks
from thor_spec.guard.locks import ADMISSION, RESIDENCY, LockDirectory

LAUNCHERS = 6
COUNTED: Counter[str] = Counter()


def engine(residency: locks.Lock, launcher_gone: int, witness: str, tell: int, dice: random.Random) -> None:
    os.setsid()
    residency.write(identity.of_process(os.getpid(), uuid="u"))
    fd = os.open(witness, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(tell, b"w")
    except BlockingIOError:
        os.write(tell, b"C")
    select.select([launcher_gone], [], [])
    time.sleep(dice.choice([0, 0, 0.001, 0.003]))
    os._exit(0)


def launcher(directory: LockDirectory, witness: str, obey: int, tell: int, dice: random.Random) -> None:
    try:
        admission = directory.take(ADMISSION, identity.of_process(os.getpid(), uuid="u"))
        residency = directory.take(RESIDENCY)
    except BusyError:
        os.write(tell, b"b")
        os._exit(10)
    gone, alive = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(alive)
        os.close(obey)
        os.close(admission.fd)  # exec would close it
        engine(residency, gone, witness, tell, dice)
    os.close(gone)
    residency.close()
    os.read(obey, 1)
    os.close(alive)
    os.waitpid(pid, 0)
    admission.release()
    os._exit(0)


def interleave(directory: LockDirectory, witness: str, seed: int, tell: int) -> None:
    dice = random.Random(seed)
    running: dict[int, int] = {}
    for _ in range(dice.randint(6, 16)):
        action = dice.choice(["start", "start", "start", "stop", "kill"])
        if action == "start" and len(running) < LAUNCHERS:
            obey, order = os.pipe()
            pid = os.fork()
            if pid == 0:
                for other in (order, *running.values()):
                    os.close(other)
                launcher(directory, witness, obey, tell, dice)
            os.close(obey)
            running[pid] = order
        elif action in ("stop", "kill") and running:
            pid = dice.choice(list(running))
            if action == "stop":
                with contextlib.suppress(BrokenPipeError):
                    os.write(running[pid], b"s")
            else:
                os.kill(pid, signal.SIGKILL)
            os.close(running.pop(pid))
            COUNTED[action] += 1
            os.waitpid(pid, 0 if dice.random() < 0.5 else os.WNOHANG)
        time.sleep(dice.choice([0, 0, 0.0005, 0.002]))
    for pid, order in running.items():
        os.close(order)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def main(folder: str, first: int, count: int) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    locks.RECORD_WAIT_S = 0.002
    directory = LockDirectory.find(system=Path("/nonexistent"), private=Path(folder))
    directory.take(ADMISSION).release()
    heard, tell = os.pipe()
    os.set_blocking(heard, False)
    for seed in range(first, first + count):
        interleave(directory, f"{folder}/witness", seed, tell)
        with contextlib.suppress(BlockingIOError):
            COUNTED.update(os.read(heard, 65536).decode())
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    with contextlib.suppress(BlockingIOError):
        COUNTED.update(os.read(heard, 65536).decode())
    print(json.dumps(COUNTED))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
