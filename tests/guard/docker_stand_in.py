"""What the tests of containers share: a fake ``docker`` on the PATH, and jobs that it runs."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thor_spec.guard import container_spec, processes
from thor_spec.guard.container_runtime import ContainerRuntime
from thor_spec.guard.container_spec import ContainerSpec
from thor_spec.guard.containers import ContainerJob
from thor_spec.guard.locks import LockDirectory

from .waiting import until

IMAGE = "example.invalid/vllm@sha256:" + "0" * 64
SPEC = ContainerSpec(image=IMAGE)
SOME_JOB = "0b6c1c9e-59e0-4e2b-8f39-4b9c5a4a1c11"
FAKE = Path(__file__).with_name("fake_docker.py")
Contain = Callable[..., ContainerJob]


class Docker:
    """The fake, seen from a test: its faults, its calls, and containers that somebody else left in it."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.state = folder / "docker"
        self.bin.mkdir()
        self.state.mkdir()
        program = self.bin / "docker"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {FAKE} {self.state} "$@"\n')
        program.chmod(0o755)

    @property
    def runtime(self) -> ContainerRuntime:
        return ContainerRuntime(str(self.bin / "docker"), answer_s=10, change_s=10)

    def impatient(self, *, answer_s: float = 10, change_s: float = 10) -> ContainerRuntime:
        return replace(self.runtime, answer_s=answer_s, change_s=change_s)

    def fault(self, verb: str, kind: str | None) -> None:
        path = self.state / f"fault.{verb}"
        if kind is None:
            path.unlink()
        else:
            path.write_text(kind)

    def calls(self, verb: str | None = None) -> list[list[str]]:
        path = self.state / "calls"
        made = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in made if verb in (None, call[0])]

    def containers(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in self.state.glob("*.json")]

    def leave(self, locks: LockDirectory, /, *, job: str, state: str = "created", **labels: str) -> str:
        """Leave a container behind that no launcher of this test made."""
        known = {
            container_spec.JOB_LABEL: job,
            container_spec.BOOT_LABEL: processes.boot_id(),
            container_spec.LOCKS_LABEL: str(locks.path),
        }
        made = os.urandom(32).hex()
        described = {
            "Id": made,
            "Name": f"/thor-spec-{job[:8]}",
            "State": {"Status": state, "Pid": 0, "ExitCode": 0},
            "Config": {"Image": IMAGE, "Labels": {**known, **{f"thor-spec.{k}": v for k, v in labels.items()}}},
            "cgroup": "",
        }
        (self.state / f"{made}.json").write_text(json.dumps(described))
        return made

    def clean(self) -> None:
        """End what runs; a test that failed must not leave a process."""
        for container in self.containers():
            if pid := container["State"]["Pid"]:
                process = processes.read(pid)
                if process and process.is_live:
                    os.kill(pid, 9)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    fake = Docker(tmp_path)
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    yield fake
    fake.clean()


@pytest.fixture
def contain(docker: Docker, locks: LockDirectory) -> Iterator[Callable[..., ContainerJob]]:
    """Start jobs in containers from this process."""
    started: list[ContainerJob] = []

    def contain(argv: tuple[str, ...], **options: Any) -> ContainerJob:
        options = {
            "spec": SPEC, "locks": locks, "grace_s": 5.0, "find_orphans": tuple, "runtime": docker.runtime, **options
        }  # fmt: skip
        started.append(ContainerJob.start(argv, **options))
        return started[-1]

    yield contain
    for job in started:
        for fault in docker.state.glob("fault.*"):
            fault.unlink()
        job.kill()
        job.close()


def log_client() -> int:
    """Return the pid of the client that follows the log; while it execs, its arguments cannot be read."""

    def found() -> list[int]:
        return [p.pid for p in processes.descendants(os.getpid()) if "logs" in processes.arguments(p.pid)]

    return int(until(found)[0])
