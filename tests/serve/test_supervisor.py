"""From the start to the end of an engine, with one that misbehaves in every way a launcher must notice."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from thor_spec.errors import (
    BusyError,
    CanaryError,
    ConfigError,
    EngineDeadError,
    EngineStartError,
    LockPathError,
    PlatformError,
)
from thor_spec.guard.locks import ADMISSION, LockDirectory
from thor_spec.rope.scheme import Scheme
from thor_spec.serve import supervisor
from thor_spec.serve.events import Ready
from thor_spec.serve.phases import Phase
from thor_spec.serve.plan import Plan

from .conftest import Recorder, interrupt, nothing_left_behind


def test_ready_then_stop(plan: Callable[..., Plan], port: int) -> None:
    recorder = Recorder(interrupt())
    with nothing_left_behind(port):
        supervisor.serve(plan("child"), recorder)
    assert recorder.phases == [Phase.START, Phase.WEIGHTS, Phase.SERVER, Phase.CANARY, Phase.READY]
    assert recorder.stopped
    ready = recorder.was_ready
    assert ready
    assert ready.checks == ("plain", "stream", "repeat", "tool call", "speculation")
    assert ready.kv
    assert (ready.kv.tokens, ready.kv.sequences, ready.draft_tokens) == (4096, 2.0, 7)


def test_an_engine_in_a_pid_namespace_is_known_by_the_pid_in_its_receipt(plan: Callable[..., Plan], port: int) -> None:
    apart = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("not run: this user may not make a pid namespace")
    recorder = Recorder(interrupt(times=2))  # the first process of a namespace takes no SIGTERM: the grace is skipped
    made = plan()
    with nothing_left_behind(port):
        supervisor.serve(replace(made, argv=(*apart, *made.argv)), recorder)
    assert recorder.was_ready


def test_a_tie_tipped_by_a_neighbour_is_no_fault(plan: Callable[..., Plan], port: int) -> None:
    recorder = Recorder(interrupt())
    with nothing_left_behind(port):
        supervisor.serve(plan("tie beside a neighbour"), recorder)
    assert recorder.was_ready


def test_the_full_canary(plan: Callable[..., Plan], port: int, tmp_path: Path) -> None:
    golden = tmp_path / "golden.json"
    golden.write_text('[{"prompt": "x", "text": "as ever"}]')
    recorder = Recorder(interrupt())
    with nothing_left_behind(port):
        supervisor.serve(plan(canary="full", golden=golden, acceptance_floor=2.0), recorder)
    assert recorder.was_ready
    everything = ("plain", "stream", "repeat", "tool call", "batch", "long prompt", "golden answers", "speculation")
    assert recorder.was_ready.checks == everything


def test_golden_answers_that_cannot_be_read_start_nothing(plan: Callable[..., Plan], port: int, tmp_path: Path) -> None:
    recorder = Recorder()
    with nothing_left_behind(port), pytest.raises(ConfigError, match="cannot be read: No such file"):
        supervisor.serve(plan(golden=tmp_path / "none.json"), recorder)
    assert recorder.phases == []


@pytest.mark.parametrize(
    ("fault", "golden", "error", "says"),
    [
        ("long prompts differ", "[]", ConfigError, "are empty"),
        ("long prompts differ", '[{"prompt": "x"}]', ConfigError, "must be a JSON list"),
        ("long prompts differ", None, CanaryError, "A prompt of 2032 tokens, asked twice"),
        ("child", '[{"prompt": "x", "text": "otherwise"}]', CanaryError, "weights, kernels or templates"),
        ("none accepted", None, CanaryError, "1.00 tokens come out of a verify step, below the floor of 2"),
    ],
)
def test_what_the_full_canary_finds(
    plan: Callable[..., Plan], port: int, tmp_path: Path, fault: str, golden: str | None, error: type, says: str
) -> None:
    given = {"canary": "full", "acceptance_floor": 2.0}
    if golden is not None:
        given["golden"] = tmp_path / "golden.json"
        (tmp_path / "golden.json").write_text(golden)
    with nothing_left_behind(port), pytest.raises(error, match=says):
        supervisor.serve(plan(fault, **given), Recorder())


def test_a_second_signal_skips_the_grace(plan: Callable[..., Plan], port: int) -> None:
    began = time.monotonic()
    with nothing_left_behind(port):
        supervisor.serve(plan("deaf"), Recorder(interrupt(times=2)))
    assert time.monotonic() - began < supervisor.GRACE_S


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("die in load", EngineStartError, "ValueError: no such tensor: lm_head"),
        ("old ptxas", EngineStartError, r"ptxas fatal .*'sm_110a' .*\nSee .*\. Triton uses a ptxas that does not know"),
        ("seam moved", PlatformError, "a seam moved"),
        ("no plugin", PlatformError, "without the thor_spec plugin"),
        ("nondeterministic", CanaryError, "gave different tokens"),
        ("short answer", CanaryError, "asked for 16 tokens"),
        ("bad tool call", CanaryError, "tool call came back malformed"),
        ("no drafts", CanaryError, "drafted nothing"),
        ("errors", CanaryError, "answered 500"),
        ("stream breaks off", CanaryError, "EngineCore died"),
        ("no choices", CanaryError, 'was answered with {"object": "error"}'),
        ("die in canary", EngineStartError, "RuntimeError: the kernel gave up"),
    ],
)
def test_what_goes_wrong_before_ready(
    plan: Callable[..., Plan], port: int, fault: str, error: type[Exception], says: str
) -> None:
    recorder = Recorder()
    with nothing_left_behind(port), pytest.raises(error, match=says):
        supervisor.serve(plan(fault), recorder)
    assert recorder.was_ready is None


LOST = r"ended during the canary.*: Worker proc VllmWorker-0 died .*\nSee .*engine\.log\. One of the engine's workers"


@pytest.mark.parametrize("faults", [(), ("and stay",), ("engine apart",), ("engine apart", "and stay")], ids=" ".join)
def test_an_engine_that_dies_under_the_canary_did_not_answer_wrongly(
    plan: Callable[..., Plan], port: int, faults: tuple[str, ...]
) -> None:
    with nothing_left_behind(port), pytest.raises(EngineStartError, match=LOST):
        supervisor.serve(plan("lose a worker in canary", *faults), Recorder())


def test_an_engine_whose_log_says_nothing_is_missed_all_the_same(plan: Callable[..., Plan], port: int) -> None:
    asked = plan("lose a worker in canary", "engine apart", "and stay", "say nothing")
    with nothing_left_behind(port), pytest.raises(EngineStartError, match=r"its log shows no error\nSee .*engine\.log"):
        supervisor.serve(asked, Recorder())


def test_a_rope_type_that_the_engine_ignores_stops_the_start(plan: Callable[..., Plan], port: int) -> None:
    asked = replace(plan(), rope=Scheme(type="yarn", native=1024, factor=2.0))
    with nothing_left_behind(port), pytest.raises(PlatformError, match=r"--rope was ignored: .*'yarn'.* its own"):
        supervisor.serve(asked, Recorder())


def test_row04_an_engine_that_dies_while_serving(plan: Callable[..., Plan], port: int) -> None:
    def kill(ready: Ready) -> None:
        (engine,) = [p for p in psutil.Process(ready.pid).children() if "fake_engine" in " ".join(p.cmdline())]
        engine.kill()

    with nothing_left_behind(port), pytest.raises(EngineDeadError, match=r"while it was serving \(status 137\)"):
        supervisor.serve(plan(), Recorder(kill))


@pytest.mark.parametrize("fault", ["hang in load", "hang in canary"])
def test_a_stop_before_ready(plan: Callable[..., Plan], port: int, fault: str) -> None:
    recorder = Recorder()
    wanted = Phase.WEIGHTS if fault == "hang in load" else Phase.CANARY

    def stop_when_there() -> None:
        while wanted not in recorder.phases and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    deadline = time.monotonic() + 30
    waiter = threading.Thread(target=stop_when_there, daemon=True)
    waiter.start()
    with nothing_left_behind(port):
        supervisor.serve(plan(fault), recorder)
    waiter.join()
    assert recorder.was_ready is None
    assert recorder.stopped


def test_a_busy_device_starts_nothing(plan: Callable[..., Plan], tmp_path: Path) -> None:
    held = LockDirectory.find().take(ADMISSION)
    with pytest.raises(BusyError):
        supervisor.serve(plan(), Recorder())
    held.release()
    assert not (tmp_path / "engine.log").exists()


def test_a_stop_while_waiting_for_the_device(plan: Callable[..., Plan], tmp_path: Path) -> None:
    held = LockDirectory.find().take(ADMISSION)
    recorder = Recorder()
    recorder.waiting = lambda _: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[method-assign]
    supervisor.serve(plan(wait=True), recorder)
    held.release()
    assert not (tmp_path / "engine.log").exists()


def test_the_address_is_tried_before_the_engine(plan: Callable[..., Plan], port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"Port {port} of 127.0.0.1 is in use"):
            supervisor.serve(plan(), Recorder())
    with pytest.raises(ConfigError, match="not an address of this machine"):
        supervisor.serve(plan(host="192.0.2.1"), Recorder())
    with pytest.raises(ConfigError, match="names no address"):
        supervisor.serve(plan(host="no such host"), Recorder())


def test_an_unwritable_log(plan: Callable[..., Plan], port: int) -> None:
    with nothing_left_behind(port), pytest.raises(ConfigError, match="cannot be written"):
        supervisor.serve(plan(log_file=Path("/proc/no/engine.log")), Recorder())


@pytest.mark.parametrize("name", ["nodir/s.jsonl", "."])
def test_a_recording_that_cannot_be_written_starts_nothing(
    plan: Callable[..., Plan], port: int, tmp_path: Path, name: str
) -> None:
    recorder = Recorder(interrupt())
    with nothing_left_behind(port), pytest.raises(ConfigError, match=r"--record .* cannot be written \((No such|Is a)"):
        supervisor.serve(plan(record=tmp_path / name), recorder)
    assert recorder.phases == []
    with pytest.raises(ConfigError, match="--record"):
        plan(record=tmp_path / name).become()


def test_a_recording_is_its_owners_and_added_to(plan: Callable[..., Plan], port: int, tmp_path: Path) -> None:
    record = tmp_path / "s.jsonl"
    record.write_text("before")
    with nothing_left_behind(port):
        supervisor.serve(plan(record=record), Recorder(interrupt()))
        supervisor.serve(plan(record=tmp_path / "new.jsonl"), Recorder(interrupt()))
    assert record.read_text() == "before"
    assert (tmp_path / "new.jsonl").stat().st_mode & 0o777 == 0o600


def test_an_unwritable_runtime_directory(plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THOR_SPEC_RUNTIME_DIR", "/proc/no")
    with pytest.raises(LockPathError):
        supervisor.serve(plan(), Recorder())
