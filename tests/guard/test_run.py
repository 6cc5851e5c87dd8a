"""``thor-spec run`` under the watchdog, as a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from thor_spec.errors import OrphanError
from thor_spec.guard.memory import ProcMemory

from .docker_stand_in import IMAGE
from .waiting import until

THOR_SPEC = (sys.executable, "-m", "thor_spec")
Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    folders = {"THOR_SPEC_RUNTIME_DIR": str(tmp_path / "run"), "THOR_SPEC_STATE_DIR": str(tmp_path / "state")}
    return {**os.environ, **folders}


@pytest.fixture
def run(environment: dict[str, str]) -> Iterator[Run]:
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
        command = (*THOR_SPEC, "run", *arguments)
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, **options))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


@pytest.fixture
def running(run: Run, environment: dict[str, str]) -> Run:
    """Start a job, by default one that sleeps, and return once it runs.

    An engine of nobody, which another worker's test has alive for a moment, rightly refuses a start; try again then.
    """

    def settled(process: "subprocess.Popen[str]") -> bool:
        holder = ask(environment)["holder"]
        return process.poll() is not None or (holder is not None and holder["phase"] == "running")

    def start(*arguments: str) -> "subprocess.Popen[str]":
        for _ in range(20):
            process = run("--memory-floor", "0", *(arguments or ("--", "sleep", "60")))
            until(lambda process=process: settled(process), 20)
            if process.poll() is None:
                return process
            assert process.stderr is not None
            said = process.stderr.read()
            assert process.returncode == OrphanError.exit_code, said
        raise AssertionError(said)

    return start


def ask(environment: dict[str, str], *arguments: str) -> Any:
    done = subprocess.run((*THOR_SPEC, "status", "--json", *arguments), capture_output=True, env=environment)
    return json.loads(done.stdout)


def test_row16_run_is_guarded_and_ends_with_30(run: Run, environment: dict[str, str]) -> None:
    # Really takes memory, until it is stopped or has what this machine can spare for a test.
    hog = "import time; taken = [bytearray(b'1') * (1 << 27) for _ in range(32)]; time.sleep(60)"
    floor = ProcMemory().read().available_bytes - (1 << 30)
    process = run("--memory-floor", str(floor), "--", sys.executable, "-c", hog)
    assert process.wait(20) == 30
    assert process.stderr is not None
    text = process.stderr.read()
    assert re.search("thor-spec: The job was killed to keep the board alive: (floor|slope): MemAvailable", text)
    assert "Traceback" not in text
    last = ask(environment, "--last")
    assert (last["exit_code"], last["title"]) == (30, f"run {sys.executable}")
    assert last["trigger"]["floor_bytes"] == floor


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137)])
def test_the_record_holds_what_run_exits_with(run: Run, environment: dict[str, str], script: str, code: int) -> None:
    assert run("--memory-floor", "0", "--", "sh", "-c", script).wait(20) == code
    last = ask(environment, "--last")
    assert (last["exit_code"], last["cause"]) == (code, f"the command ended with status {code}")


def test_a_job_that_does_not_fit_is_not_started(run: Run, environment: dict[str, str], tmp_path: Path) -> None:
    process = run("--memory-floor", str(1 << 60), "--", "touch", str(tmp_path / "started"))
    assert process.wait(20) == 12
    assert process.stderr is not None
    assert re.search(r"Only \S+ GiB of memory are available, .*drop_caches.*--memory-floor", process.stderr.read())
    assert not (tmp_path / "started").exists()
    assert ask(environment)["held"] is False


@pytest.mark.parametrize("container", [(), ("--container", IMAGE)], ids=["host", "container"])
def test_a_stop_while_waiting_ends_the_wait(run: Run, running: Run, container: tuple[str, ...]) -> None:
    running()
    waiting = run("--wait", *container, "--", "true")
    assert waiting.stderr is not None
    assert waiting.stderr.readline().startswith("Waiting for pid")
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(10) == 0


def test_a_busy_device_is_told_before_memory_that_its_job_has_taken(run: Run, running: Run) -> None:
    running()
    assert run("--memory-floor", str(1 << 60), "--", "true").wait(20) == 10


def test_status_shows_a_run_and_its_margin(running: Run, environment: dict[str, str]) -> None:
    process = running()
    found = ask(environment)
    assert found["margin_bytes"] > 0
    assert found["uptime_s"] >= 0
    assert found["last_token_s"] is None
    process.terminate()
    assert process.wait(20) == 0
    assert ask(environment, "--last")["cause"] == "requested stop"


@pytest.mark.parametrize("detached", [False, True])
def test_row14_a_hangup_ends_a_run_unless_it_is_detached(running: Run, detached: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if detached else signal.SIG_DFL)  # inherited, as from nohup
    try:
        process = running()
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    if detached:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.7)
        process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_row13_a_storm_ends_a_deaf_run_at_once(running: Run, environment: dict[str, str]) -> None:
    deaf = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; time.sleep(60)"
    process = running("--grace", "60", "--", sys.executable, "-c", deaf)
    for _ in range(30):
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert ask(environment)["held"] is False
