"""What benchmarks rely on: who measures is alone, and engines start only where they fit."""

import fcntl
import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

from thor_spec.bench import statistic

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


quiet, everything = load("quiet"), load("all")


def is_free(lock: Path, how: str) -> bool:
    """Whether another process would get the lock at once."""
    code = f"import fcntl; fcntl.flock(open({str(lock)!r}), fcntl.LOCK_{how} | fcntl.LOCK_NB)"
    return subprocess.run((sys.executable, "-c", code), stderr=subprocess.DEVNULL).returncode == 0


def test_who_starts_engines_lets_others_start_theirs_and_nobody_measure(tmp_path: Path) -> None:
    machine = quiet.Machine(lock := tmp_path / "lock")
    assert is_free(lock, "SH")
    assert not is_free(lock, "EX")
    with machine.alone():
        assert not is_free(lock, "SH")
    assert is_free(lock, "EX")


def test_who_waits_to_measure_keeps_those_that_come_later_waiting(tmp_path: Path) -> None:
    """Short shares that overlap would otherwise let nobody measure."""
    first, measured = quiet.take(fcntl.LOCK_SH, lock := tmp_path / "lock"), threading.Event()

    def measure() -> None:
        with quiet.take(fcntl.LOCK_EX, lock):
            assert not shared.is_set()
            measured.set()

    shared = threading.Event()

    def share() -> None:
        with quiet.take(fcntl.LOCK_SH, lock):
            assert measured.is_set()
            shared.set()

    waiting, later = threading.Thread(target=measure), threading.Thread(target=share)
    waiting.start()
    while is_free(lock.with_suffix(".door"), "EX"):
        time.sleep(0.01)
    later.start()
    later.join(0.2)
    assert not measured.is_set()
    assert not shared.is_set()
    first.close()
    waiting.join()
    later.join()
    assert shared.is_set()


@pytest.mark.parametrize(("how", "shared"), [("beside", True), ("alone", False)])
def test_a_script_holds_the_lock_as_long_as_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, shared: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    argv = (sys.executable, str(BENCHMARKS / "quiet.py"), how, "-c", "print(1, flush=True); input()")
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "1\n"
        assert is_free(tmp_path / quiet.LOCK.name, "SH") is shared
        assert not is_free(tmp_path / quiet.LOCK.name, "EX")
        script.communicate("\n")
    assert is_free(tmp_path / quiet.LOCK.name, "EX")


MEET = """
import pathlib, sys, time
mine, theirs = map(pathlib.Path, sys.argv[1:])
mine.touch()
ends = time.monotonic() + 20
while not theirs.exists():
    assert time.monotonic() < ends
    time.sleep(0.05)
"""


def test_jobs_run_side_by_side_where_they_fit_and_one_after_the_other_where_not(tmp_path: Path) -> None:
    (script := tmp_path / "meet.py").write_text(MEET)
    one, other, large = (tmp_path / name for name in ("one", "other", "large"))
    jobs = [
        everything.Job("one", 4, f"{script} {one} {other}"),
        everything.Job("large", 9, f"{script} {large} {one}"),
        everything.Job("other", 4, f"{script} {other} {one}"),
        everything.Job("red", 1, str(script)),
    ]
    assert everything.run(jobs, tmp_path / "out", 9, "") == ["red"]
    state = json.loads((tmp_path / "out" / "state.json").read_text())
    assert {name: of["is"] for name, of in state.items()} == {
        "one": "done", "large": "done", "other": "done", "red": "failed",
    }  # fmt: skip
    assert state["large"]["since_s"] >= state["one"]["since_s"] + state["one"]["took_s"] - 1


def test_every_job_names_scripts_that_are_there() -> None:
    for job in everything.JOBS:
        named = [part for part in job.line.split() if part.endswith(".py")]
        assert named
        assert all((BENCHMARKS.parent / script).is_file() for script in named)


def test_a_job_that_there_is_not_is_refused() -> None:
    done = subprocess.run(
        (sys.executable, str(BENCHMARKS / "all.py"), "--only", "tre"), capture_output=True, text=True
    )  # fmt: skip
    assert done.returncode == 1
    assert "No job is called tre. --list" in done.stderr


def test_ratios_are_drawn_as_those_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistic, "BOOTSTRAPS", 2)
    ours, theirs = [1.0, 2.5, 3.1, 2.2, 7.0], [1.3, 2.0, 3.0, 2.4, 3.0]
    want = statistic.paired_ratio(ours, theirs)
    found = load("record").paired_ratio(ours, theirs)
    assert found == {name: round(want[name], 4) for name in ("median", "low95", "high95")}
