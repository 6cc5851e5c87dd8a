"""``thor-spec run --container`` as a process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from thor_spec.errors import OrphanError
from thor_spec.guard.locks import LockDirectory
from thor_spec.guard.status import status

from .conftest import Engine
from .docker_stand_in import IMAGE, Docker
from .waiting import alive, until

TRIES = 20
"""An engine of nobody, which another worker's test has alive for a moment, rightly refuses a start; try again then."""


def command(docker: Docker, locks: LockDirectory, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "THOR_SPEC_RUNTIME_DIR": str(locks.path.parent)}
    call = [sys.executable, "-m", "thor_spec", *arguments]
    for _ in range(TRIES):
        done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=60)
        if done.returncode != OrphanError.exit_code:
            break
    return done


def test_the_command_line_runs_a_container(docker: Docker, locks: LockDirectory, tmp_path: Path) -> None:
    options = ("--container", IMAGE, "--mount", str(tmp_path), "--shm-size", str(20 << 30))
    done = command(docker, locks, "run", *options, "--", "sh", "-c", "echo $0; exit 7", "x")
    assert (done.returncode, done.stdout) == (7, "x\n"), done.stderr
    assert "Shared memory of 20 GiB" in done.stderr
    assert docker.containers() == []


def test_the_command_line_says_what_could_not_be_removed(docker: Docker, locks: LockDirectory) -> None:
    docker.fault("start", "fail")
    docker.fault("rm", "refuse")
    done = command(docker, locks, "run", "--container", IMAGE, "--", "true")
    assert done.returncode == 13
    assert "could not be removed. Run `thor-spec reap --yes`" in done.stderr
    assert done.stderr.count("\n") <= 2


def test_ctrl_c_stops_the_container(docker: Docker, locks: LockDirectory, engine: Engine) -> None:
    environment = {**os.environ, "THOR_SPEC_RUNTIME_DIR": str(locks.path.parent)}
    call = [sys.executable, "-m", "thor_spec", "run", "--container", IMAGE, "--", *engine.argv("pass")]
    for _ in range(TRIES):
        launcher = subprocess.Popen(call, env=environment)
        if until(lambda launcher=launcher: engine.pids() or launcher.poll()) != OrphanError.exit_code:
            break
    with launcher:
        first = engine.pid("first")
        until(lambda: status(locks).holder and status(locks).holder.container)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(20) == 0
    assert not alive(first)
    assert docker.containers() == []
    assert [call[2] for call in docker.calls("kill")] == ["TERM"]
