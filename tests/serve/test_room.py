"""A cache that is larger than what is free is refused before anything starts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guard.series import FakeProc
from thor_spec.device.cuda import Gpu
from thor_spec.errors import CapacityError
from thor_spec.guard.guarded import Settings
from thor_spec.guard.memory import GIB, ProcMemory
from thor_spec.serve import room, supervisor
from thor_spec.serve.plan import Plan

from .conftest import Recorder, interrupt, nothing_left_behind


def test_a_start_is_refused_at_once(plan: Callable[..., Plan], port: int, calm: Settings) -> None:
    recorder = Recorder(interrupt())
    says = r"--kv-cache-memory 500\.00 GiB is more than there is: .* GiB of memory are free"
    with nothing_left_behind(port), pytest.raises(CapacityError, match=says) as refused:
        supervisor.serve(plan(kv_cache_memory=500 * GIB), recorder, settings=calm)
    assert recorder.phases == []
    assert refused.value.exit_code == 12


@pytest.mark.parametrize(("asked", "fits"), [(None, True), (1, True), (15, True), (17, False)])
def test_the_floor_is_left(tmp_path: Path, asked: int | None, fits: bool) -> None:
    proc = FakeProc(tmp_path)
    proc.available(20.0)
    memory = ProcMemory(proc.sources.meminfo, proc.sources.pressure)
    size = None if asked is None else asked * GIB
    if fits:
        room.require_cache(size, memory, 4 * GIB, gpu=False)
        return
    with pytest.raises(CapacityError, match=r"4\.00 GiB must stay so"):
        room.require_cache(size, memory, 4 * GIB, gpu=False)


@pytest.mark.parametrize("asked", [100, 200])
def test_a_device_s_own_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int) -> None:
    proc = FakeProc(tmp_path)
    proc.available(20.0)
    memory = ProcMemory(proc.sources.meminfo, proc.sources.pressure)
    gpu = Gpu(name="NVIDIA H200", capability=(9, 0), count=1, total_bytes=140 * GIB)
    monkeypatch.setattr(room.cuda, "probe", lambda: gpu)
    if asked < 140:
        room.require_cache(asked * GIB, memory, 4 * GIB, gpu=True)
        return
    with pytest.raises(CapacityError, match=r"NVIDIA H200 has 140\.00 GiB"):
        room.require_cache(asked * GIB, memory, 4 * GIB, gpu=True)
