"""Real processes, real locks, real signals; every test has a lock directory of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from thor_spec.errors import ThorSpecError
from thor_spec.guard.job import Job
from thor_spec.guard.locks import LockDirectory

from .docker_stand_in import contain, docker  # noqa: F401  # fixtures
from .guarding import guard, guard_container, launched, proc, state_dir  # noqa: F401  # fixtures
from .waiting import PYTHON, until

Start = Callable[..., Job]
Bystander = Callable[..., "subprocess.Popen[bytes]"]


class Engine:
    """A program that leaves the pids of its processes in a directory, one empty file each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def argv(self, *bodies: str) -> tuple[str, ...]:
        """Return a command whose process runs the first body, and one child per further body."""
        prelude = (
            "import os, signal, sys, time\n"
            f"here = lambda name: open({str(self.directory)!r} + f'/{{name}}.{{os.getpid()}}', 'w').close()\n"
            "ignore = lambda: [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]\n"
        )
        first, *rest = bodies
        lines = [prelude]
        for index, body in enumerate(rest, 1):
            lines.append(
                f"if os.fork() == 0:\n    {body}\n    here('child{index}')\n    time.sleep(60)\n    os._exit(0)\n"
            )
        lines.append(f"{first}\nhere('first')\ntime.sleep(60)\n")
        return (*PYTHON, "".join(lines))

    def pid(self, name: str) -> int:
        return until(lambda: [int(p.suffix[1:]) for p in self.directory.glob(f"{name}.*")])[0]

    def pids(self) -> list[int]:
        return [int(path.suffix[1:]) for path in self.directory.iterdir()]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "engine")


@pytest.fixture
def locks(tmp_path: Path) -> LockDirectory:
    return LockDirectory.find(system=tmp_path / "no-system-directory", private=tmp_path / "runtime")


@pytest.fixture
def start(locks: LockDirectory) -> Iterator[Callable[..., Job]]:
    """Start jobs from this process, blind to engines that other work on this machine may run."""
    started: list[Job] = []

    def start(argv: Sequence[str], **options: Any) -> Job:
        options = {"locks": locks, "grace_s": 5.0, "find_orphans": tuple, **options}
        started.append(Job.start(argv, **options))
        return started[-1]

    yield start
    for job in started:
        job.kill()
        job.close()


class Launcher:
    """A forked process that starts one job, tells how that went, and then obeys."""

    def __init__(self, locks: LockDirectory, argv: Sequence[str], options: dict[str, Any], gate: int | None) -> None:
        answer, self._tell = os.pipe()
        obey, order = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._run(locks, argv, options, gate, obey)
            finally:
                os._exit(99)
        os.close(self._tell)
        os.close(obey)
        self._answer, self._order = answer, order
        self._heard = b""

    def _run(
        self, locks: LockDirectory, argv: Sequence[str], options: dict[str, Any], gate: int | None, obey: int
    ) -> None:
        keep = sorted(fd for fd in (self._tell, gate, obey) if fd is not None)
        for low, high in zip([2, *keep], [*keep, 256], strict=True):
            os.closerange(low + 1, high)
        if gate is not None:
            os.read(gate, 1)  # returns when the last writer closes
        begun = time.monotonic()
        try:
            job = Job.start(argv, locks=locks, **{"grace_s": 5.0, "find_orphans": tuple, **options})
        except ThorSpecError as error:
            self._say(code=error.exit_code, text=str(error), after_s=time.monotonic() - begun)
            os._exit(error.exit_code)
        self._say(code=0, shim=job.pid)
        if os.read(obey, 1):
            job.stop()
            job.close()
            self._say(stopped=True)
        os._exit(0)

    def _say(self, **what: Any) -> None:
        os.write(self._tell, json.dumps(what).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """Return the next answer; empty when it died before giving one."""
        while b"\n" not in self._heard:
            part = os.read(self._answer, 4096)
            if not part:
                return {}
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        return dict(json.loads(line))

    def order_stop(self) -> None:
        with suppress(BrokenPipeError):  # it lost the race and has ended
            os.write(self._order, b"s")

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def close(self) -> None:
        self.kill()
        os.close(self._answer)
        os.close(self._order)


@pytest.fixture
def launch(locks: LockDirectory) -> Iterator[Callable[..., Launcher]]:
    """Start launchers in processes of their own, which a test may kill."""
    launchers: list[Launcher] = []

    def launch(argv: Sequence[str], *, gate: int | None = None, **options: Any) -> Launcher:
        launchers.append(Launcher(locks, argv, options, gate))
        return launchers[-1]

    yield launch
    for launcher in launchers:
        launcher.close()


@pytest.fixture
def bystander(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start processes outside any job; a test of the guard must leave them unsignalled."""
    started: list[subprocess.Popen[bytes]] = []

    def bystander(title: str = sys.executable, *arguments: str) -> subprocess.Popen[bytes]:
        ready = tmp_path / f"bystander{len(started)}"
        # Any signal that can be caught leaves a mark; the others end it.
        body = (
            "import signal, time\n"
            f"mark = lambda n, _: open({str(ready) + '.signalled'!r}, 'a').write(f'{{n}} ')\n"
            "for n in set(range(1, 32)) - {9, 17, 19}: signal.signal(n, mark)\n"
            f"open({str(ready)!r}, 'w').close()\nwhile True: time.sleep(60)\n"
        )
        process = subprocess.Popen((title, "-I", "-S", "-c", body, *arguments), executable=sys.executable)
        started.append(process)
        until(ready.exists)
        return process

    yield bystander
    for index, process in enumerate(started):
        assert process.poll() is None, "a bystander was killed"
        assert not (tmp_path / f"bystander{index}.signalled").exists(), "a bystander was signalled"
        process.kill()
        process.wait()
