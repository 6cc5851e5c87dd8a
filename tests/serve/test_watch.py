"""Starts and services that go wrong, each with a real engine process."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.guard.series import FakeProc
from thor_spec.errors import (
    CanaryError,
    EngineDeadError,
    GuardFailureError,
    MemoryGuardError,
    MemoryNotReturnedError,
    StalledError,
    StartDeadlineError,
)
from thor_spec.guard import state
from thor_spec.guard.guarded import Settings
from thor_spec.guard.status import status
from thor_spec.serve import supervisor
from thor_spec.serve.events import Ready
from thor_spec.serve.phases import Phase
from thor_spec.serve.plan import Plan

from .conftest import Recorder, interrupt, nothing_left_behind

MakePlan = Callable[..., Plan]
Begin = Callable[..., None]


class Clock:
    """The machine's clock, running ahead only in the phase that a test is about: no other one can be late."""

    def __init__(self, recorder: Recorder, phase: Phase, speed: float = 100) -> None:
        self._recorder = recorder
        self._phase = phase
        self._speed = speed
        self._ahead_s = 0.0
        self._looked = time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        if self._recorder.phases and self._recorder.phases[-1] is self._phase:
            self._ahead_s += (now - self._looked) * (self._speed - 1)
        self._looked = now
        return now + self._ahead_s


def last(tmp_path: Path) -> state.StopRecord:
    found = state.StateStore(tmp_path / "state").read()
    assert found is not None
    return found


def engine_of(ready: Ready) -> list[psutil.Process]:
    return [p for p in psutil.Process(ready.pid).children(recursive=True) if "fake_engine" in " ".join(p.cmdline())]


def watchdogs() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "thor_spec.guard.watchdog" in process.cmdline():
                found.append(process)
    return found


def stop_when(condition: Callable[[], Any]) -> threading.Thread:
    """Interrupt the launcher once ``condition`` holds."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("fault", ["stuck running", "stuck waiting"])
def test_row17_a_hung_engine_whose_health_answers_is_restarted_once_and_ends_31(
    plan: MakePlan, port: int, begin: Begin, tmp_path: Path, fault: str
) -> None:
    readies: list[Ready] = []

    def turn_bad(ready: Ready) -> None:
        readies.append(ready)
        begin(fault)

    recorder = Recorder(turn_bad)
    with nothing_left_behind(port), pytest.raises(StalledError, match="makes no progress") as raised:
        supervisor.serve(plan(), recorder, clock=Clock(recorder, Phase.READY))
    assert raised.value.exit_code == 31
    assert len({ready.pid for ready in readies}) == 2
    assert any("started again, once" in line for line in recorder.notices)
    found = last(tmp_path)
    assert (found.exit_code, found.phase) == (31, "ready")
    assert found.dump is not None
    dumped = {path.name: path.read_text() for path in Path(found.dump).iterdir()}
    assert set(dumped) == {"reason", "log", "kernel-log", "stacks"}
    assert "init engine" in dumped["log"]
    assert "fake_engine" in dumped["stacks"]
    assert len(list((tmp_path / "state" / "dumps").iterdir())) == 2


def test_row17_an_idle_engine_that_answers_no_request_is_found_by_its_canary(
    plan: MakePlan, port: int, begin: Begin
) -> None:
    recorder = Recorder(lambda _: begin("refuse"))
    # The restart finds it well until READY.
    recorder.notice = lambda line: begin() if "started again" in line else None  # type: ignore[method-assign]
    with nothing_left_behind(port), pytest.raises(StalledError, match="2 one-token requests to the idle engine failed"):
        supervisor.serve(plan(), recorder, clock=Clock(recorder, Phase.READY))


def test_row17_an_engine_that_recovers_by_the_restart_serves_on(plan: MakePlan, port: int, begin: Begin) -> None:
    readies: list[Ready] = []

    def bad_once(ready: Ready) -> None:
        readies.append(ready)
        begin("stuck running") if len(readies) == 1 else begin()

    waiter = stop_when(lambda: len(readies) == 2)
    recorder = Recorder(bad_once)
    with nothing_left_behind(port):
        supervisor.serve(plan(), recorder, clock=Clock(recorder, Phase.READY))
    waiter.join()


def test_row18_a_dead_engine_under_a_live_api_ends_32_within_ten_seconds(
    plan: MakePlan, port: int, tmp_path: Path
) -> None:
    killed: list[float] = []

    def kill(ready: Ready) -> None:
        api = psutil.Process(ready.pid).children()[0]
        (engine,) = api.children()
        killed.append(time.monotonic())
        engine.kill()

    with nothing_left_behind(port), pytest.raises(EngineDeadError, match="no engine process is left") as raised:
        supervisor.serve(plan("engine apart"), Recorder(kill))
    assert raised.value.exit_code == 32
    assert time.monotonic() - killed[0] < 10
    assert last(tmp_path).exit_code == 32


def test_row19_a_start_that_never_gets_ready_ends_21_naming_phase_and_log(
    plan: MakePlan, port: int, tmp_path: Path, calm: Settings
) -> None:
    recorder = Recorder()
    with nothing_left_behind(port), pytest.raises(StartDeadlineError) as raised:
        supervisor.serve(plan("hang in load"), recorder, clock=Clock(recorder, Phase.WEIGHTS), settings=calm)
    text = str(raised.value)
    assert "The phase weights has made no progress for 2 min: shard 3 of 9 does not answer" in text
    assert str(tmp_path / "engine.log") in text
    assert raised.value.exit_code == 21
    assert recorder.was_ready is None
    assert last(tmp_path).phase == "weights"


def test_row19_the_canary_has_a_deadline_too(plan: MakePlan, port: int, calm: Settings) -> None:
    recorder = Recorder()
    with nothing_left_behind(port), pytest.raises(StartDeadlineError, match="The phase canary"):
        supervisor.serve(plan("hang in canary"), recorder, clock=Clock(recorder, Phase.CANARY), settings=calm)


def test_row20_an_autotune_crawl_ends_21_with_the_way_to_marlin(plan: MakePlan, port: int, calm: Settings) -> None:
    recorder = Recorder()
    with nothing_left_behind(port), pytest.raises(StartDeadlineError) as raised:
        supervisor.serve(plan("crawl"), recorder, clock=Clock(recorder, Phase.COMPILE, 1000), settings=calm)
    assert "The phase compile" in str(raised.value)
    assert "VLLM_USE_FLASHINFER_MOE_FP4=0" in str(raised.value)
    assert "Marlin" in str(raised.value)


def test_row27_a_busy_engine_whose_metrics_fail_is_not_restarted(plan: MakePlan, port: int, begin: Begin) -> None:
    recorder = Recorder(lambda _: begin("metrics fail", "spin"))
    waiter = stop_when(lambda: any("the engine works" in line for line in recorder.notices))
    # CPU time passes on the machine's clock, so the rules' clock may not run far ahead of it here.
    with nothing_left_behind(port):
        supervisor.serve(plan(), recorder, clock=Clock(recorder, Phase.READY, 8))
    waiter.join()
    assert not any("started again" in line for line in recorder.notices)


def test_row29_garbage_answers_end_22_and_start_no_loop(plan: MakePlan, port: int, tmp_path: Path) -> None:
    recorder = Recorder()
    with nothing_left_behind(port), pytest.raises(CanaryError, match="gave different tokens") as raised:
        supervisor.serve(plan("nondeterministic"), recorder)
    assert raised.value.exit_code == 22
    assert recorder.phases.count(recorder.phases[0]) == 1
    assert recorder.notices == [line for line in recorder.notices if "watchdog" in line]
    assert last(tmp_path).exit_code == 22


def test_counters_that_go_backwards_are_told(plan: MakePlan, port: int, begin: Begin) -> None:
    recorder = Recorder()

    def told() -> bool:
        return any("restarted by itself" in line for line in recorder.notices)

    def restart() -> None:
        """Again and again: a launcher that has not looked before sees nothing go backwards."""
        while not told() and not recorder.stopped:
            for faults in (["counters restart"], []):
                begin(*faults)
                time.sleep(0.3)

    waiter, restarts = stop_when(told), threading.Thread(target=restart)
    recorder._on_ready = lambda _: restarts.start()
    with nothing_left_behind(port):
        supervisor.serve(plan(), recorder, clock=Clock(recorder, Phase.READY))
    waiter.join()
    restarts.join()
    assert told()


def test_row13_a_storm_of_signals_stops_once_and_leaves_nothing(plan: MakePlan, port: int, tmp_path: Path) -> None:
    began = time.monotonic()
    with nothing_left_behind(port):
        supervisor.serve(plan("deaf"), Recorder(interrupt(times=40)))
    assert time.monotonic() - began < supervisor.GRACE_S
    assert last(tmp_path).exit_code == 0


def test_row13_the_memory_wait_is_kept_through_the_storm(
    plan: MakePlan, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = FakeProc(tmp_path / "proc")

    def storm(ready: Ready) -> None:
        proc.available(60.0)
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.03)

    settings = Settings(sources=proc.sources, memory_wait_s=0.2)
    with nothing_left_behind(port), pytest.raises(MemoryNotReturnedError, match="drop_caches"):
        supervisor.serve(plan("deaf"), Recorder(storm), settings=settings)
    assert last(tmp_path).exit_code == 41


def test_row14_a_hangup_stops_like_a_request(plan: MakePlan, port: int) -> None:
    recorder = Recorder(lambda _: os.kill(os.getpid(), signal.SIGHUP))
    with nothing_left_behind(port):
        supervisor.serve(plan(), recorder)
    assert recorder.stopped


def test_row14_a_detached_launcher_survives_the_hangup(plan: MakePlan, port: int) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup has it

    recorder = Recorder()
    lived: list[bool] = []

    def hang_up(ready: Ready) -> None:
        def stop_later() -> None:
            time.sleep(0.5)  # a hangup that counted has begun the stop by now
            lived.append(not recorder.stopped)
            os.kill(os.getpid(), signal.SIGTERM)

        os.kill(os.getpid(), signal.SIGHUP)
        threading.Thread(target=stop_later).start()

    recorder._on_ready = hang_up
    try:
        with nothing_left_behind(port):
            supervisor.serve(plan(), recorder)
        assert lived == [True]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("moment", ["load", "service"])
def test_row16_a_floor_crossing_ends_the_engine_with_30(plan: MakePlan, port: int, tmp_path: Path, moment: str) -> None:
    proc = FakeProc(tmp_path / "proc", available_gib=5.0)
    recorder = Recorder(lambda _: proc.available(3.4))
    if moment == "load":
        threading.Timer(0.5, proc.available, [3.4]).start()
    faults = ["hang in load"] if moment == "load" else []
    with nothing_left_behind(port), pytest.raises(MemoryGuardError, match=r"3\.40 GiB .*-0\.60 GiB") as raised:
        supervisor.serve(plan(*faults), recorder, settings=Settings(sources=proc.sources))
    assert raised.value.exit_code == 30
    found = last(tmp_path)
    assert found.exit_code == 30
    assert found.trigger is not None
    assert found.margin_bytes is not None
    assert found.margin_bytes < 0
    assert any("INFO" in line for line in found.log_tail)


def test_row24_the_watchdog_of_a_serving_engine_is_replaced_once_then_70(
    plan: MakePlan, port: int, tmp_path: Path
) -> None:
    def kill_twice(ready: Ready) -> None:
        def kill() -> None:
            killed: set[int] = set()
            while len(killed) < 2:
                for process in watchdogs():
                    if process.pid not in killed:
                        killed.add(process.pid)
                        process.kill()
                time.sleep(0.01)

        threading.Thread(target=kill).start()

    recorder = Recorder(kill_twice)
    with nothing_left_behind(port), pytest.raises(GuardFailureError) as raised:
        supervisor.serve(plan(), recorder)
    assert raised.value.exit_code == 70
    assert any("a new one was started" in line for line in recorder.notices)
    assert last(tmp_path).exit_code == 70


def test_row12_a_full_disk_warns_and_the_job_lives(plan: MakePlan, port: int, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "last.tmp").symlink_to("/dev/full")
    recorder = Recorder(interrupt())
    with nothing_left_behind(port):
        supervisor.serve(plan(), recorder)
    assert recorder.was_ready
    assert any("cannot be stored" in line and "No space left" in line for line in recorder.notices)


def test_row21_a_state_directory_that_cannot_be_written_warns_and_the_job_lives(
    plan: MakePlan, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THOR_SPEC_STATE_DIR", "/proc/no")
    recorder = Recorder(interrupt())
    with nothing_left_behind(port):
        supervisor.serve(plan(), recorder)
    assert recorder.was_ready
    assert any("cannot be stored in /proc/no" in line for line in recorder.notices)


def test_ready_tells_the_margin_and_a_thin_one_warns(plan: MakePlan, port: int, tmp_path: Path) -> None:
    for gib, thin in ((5.5, True), (20.0, False)):
        proc = FakeProc(tmp_path / f"proc{gib}", available_gib=gib)
        recorder = Recorder(interrupt())
        with nothing_left_behind(port):
            supervisor.serve(plan(), recorder, settings=Settings(sources=proc.sources))
        ready = recorder.was_ready
        assert ready
        assert ready.margin_bytes == pytest.approx((gib - 4) * (1 << 30), abs=1 << 20)
        assert any("above the memory floor" in line for line in recorder.notices) == thin


def test_status_shows_margin_phase_uptime_and_the_last_token(plan: MakePlan, port: int) -> None:
    seen: list[Any] = []
    recorder = Recorder()

    def looked() -> bool:
        if recorder.was_ready:
            seen.append(status())
        return bool(seen) and seen[-1].last_token_s is not None

    import httpx

    def ask(ready: Ready) -> None:
        body = {"max_tokens": 8}
        threading.Timer(0.3, lambda: httpx.post(f"{ready.url}/v1/completions", content=json.dumps(body))).start()

    recorder._on_ready = ask
    waiter = stop_when(looked)
    with nothing_left_behind(port):
        supervisor.serve(plan(), recorder, clock=Clock(recorder, Phase.READY))
    waiter.join()
    found = seen[-1]
    assert found.holder.phase == "ready"
    assert found.margin_bytes is not None
    assert 0 < found.uptime_s < 3600
    assert 0 <= found.last_token_s < 10
    assert json.dumps(found.as_dict())
