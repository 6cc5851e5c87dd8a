"""An evaluation that was interrupted comes to the same answers, and asks nothing twice."""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thor_spec.errors import ConfigError, EngineStartError, InterruptedJobError, PlatformError
from thor_spec.eval import run
from thor_spec.eval.run import Progress, Request
from thor_spec.rope.scheme import Scheme

ENGINE = """
import hashlib, json, os, sys, time
from pathlib import Path
import numpy as np
from thor_spec.vllm_plugin import receipt, scoring

if "die" in sys.argv[3]:
    sys.exit("the engine has no legs")
rope = json.loads(os.environ["ROPE"])
if rope is not None:
    receipt.leave(receipt.Receipt(pid=os.getpid(), state="engine", rope={"target": rope} if rope else {}))
folder = Path(sys.argv[2])
scoring.confirm(folder)
for line in open(sys.argv[1]):
    request = json.loads(line)
    if scoring.done(folder, request):
        continue
    with open(folder.parent / "asked", "a") as asked:
        asked.write(request["id"] + "\\n")
    time.sleep(float(os.environ["PAUSE"]))
    seed = int(hashlib.sha256(line.encode()).hexdigest()[:8], 16)
    path = scoring.answer_path(folder, request)
    if request["kind"] == "logprobs":
        np.save(path.with_suffix(".part.npy"), np.random.default_rng(seed).random(4, dtype=np.float32))
        path.with_suffix(".part.npy").replace(path)
    else:
        path.write_text(json.dumps([seed % 7] * request["max_tokens"]))
"""
REQUESTS = [Request(id=f"a{i}", tokens=[i, 2, 3]) for i in range(6)] + [Request(id="g", tokens=[1], max_tokens=3)]
ROPE = {"type": "yarn", "native": 8, "factor": 2.0}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine that answers by a hash of the question, in the place of vLLM's."""
    engine = tmp_path / "bin" / "engine_stand_in.py"
    engine.parent.mkdir()
    engine.write_text(ENGINE)
    monkeypatch.setattr(run.scoring, "__name__", "engine_stand_in")

    def made(rope: Any = ROPE, pause: float = 0.0, argv: str = "x") -> Any:
        environment = {
            **os.environ,
            "ROPE": json.dumps(rope),
            "PAUSE": str(pause),
            "PYTHONPATH": os.pathsep.join([str(engine.parent), *sys.path]),
        }
        return SimpleNamespace(
            argv=("python", "-m", "server", argv),
            rope=Scheme.parse(ROPE),
            child_environment=lambda: environment,
        )

    return made


def answers(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "arms" / "yarn").iterdir())}


def asked(out: Path) -> list[str]:
    return (out / "arms" / "asked").read_text().split()


def test_an_interrupted_evaluation_goes_on_where_it_was(plan: Any, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    told: list[str] = []
    run.ask({"yarn": plan()}, REQUESTS, whole, tell=told.append)
    assert any(line.startswith("yarn: 7/7 requests") for line in told)

    def interrupt() -> None:
        while not (parts / "arms" / "yarn" / "a1.npy").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(InterruptedJobError, match="goes on from there"):
        run.ask({"yarn": plan(pause=0.3)}, REQUESTS, parts, tell=told.append)
    thread.join()
    before = set(answers(parts))
    assert {"a0.npy", "a1.npy"} <= before
    assert "g.json" not in before
    found = run.ask({"yarn": plan()}, REQUESTS, parts, tell=told.append)["yarn"]
    assert answers(parts) == answers(whole)
    assert len(asked(parts)) <= len(REQUESTS) + 1  # the one that was under way
    assert found.generated("g") == json.loads((whole / "arms" / "yarn" / "g.json").read_text())
    assert found.rope["target"] == ROPE
    count = len(asked(parts))
    # Nothing is started when everything is answered: this engine would be refused.
    assert run.ask({"yarn": plan(None)}, REQUESTS, parts, tell=told.append)["yarn"].rope == found.rope
    assert len(asked(parts)) == count


def test_another_evaluation_may_not_use_the_folder(plan: Any, tmp_path: Path) -> None:
    run.ask({"yarn": plan()}, REQUESTS, tmp_path / "out", tell=lambda _: None)
    with pytest.raises(ConfigError, match=r"another evaluation \(requests differ\)"):
        run.ask({"yarn": plan()}, REQUESTS[1:], tmp_path / "out", tell=lambda _: None)
    with pytest.raises(ConfigError, match=r"another evaluation \(arms differ\)"):
        run.ask({"yarn": plan(argv="y")}, REQUESTS, tmp_path / "out", tell=lambda _: None)


@pytest.mark.parametrize(
    ("rope", "error", "says"),
    [
        ({}, PlatformError, "was asked for .* its own"),
        ({**ROPE, "factor": 4.0}, PlatformError, "was asked for"),
        (None, EngineStartError, "without the thor_spec plugin"),
    ],
)
def test_an_ignored_setting_is_an_error(
    plan: Any, tmp_path: Path, rope: Any, error: type[Exception], says: str
) -> None:
    for _ in range(2):  # nor does it go unseen once everything is answered
        with pytest.raises(error, match=says):
            run.ask({"yarn": plan(rope)}, REQUESTS[:1], tmp_path / "out", tell=lambda _: None)


def test_a_dead_engine_says_why(plan: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="the engine has no legs"):
        run.ask({"yarn": plan(argv="die")}, REQUESTS, tmp_path / "out", tell=lambda _: None)


def test_progress_goes_by_tokens(tmp_path: Path) -> None:
    now, told = [0.0], []
    progress = Progress("yarn", {"a": 100, "b": 300, "c": 7200}, tmp_path, told.append, lambda: now[0])
    progress.look()
    (tmp_path / "a.npy").touch()
    now[0] = 100.0  # most of it the engine's start
    progress.look()
    progress.look()
    (tmp_path / "b.json").touch()
    now[0] = 130.0
    progress.look()
    assert told == ["yarn: 1/3 requests", "yarn: 2/3 requests, 12 min 00 s to go"]


def test_a_folder_that_could_not_be_written_is_no_evaluation(tmp_path: Path) -> None:
    """The disk is full at first; once it is not, the same command begins."""
    out = tmp_path / "out"
    out.mkdir()
    (out / run.RUN).with_suffix(".tmp").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"out cannot be written \(No space left on device\)"):
        run.claim(out, {"a": 1})
    (out / run.RUN).with_suffix(".tmp").unlink()
    run.claim(out, {"a": 1})
    run.claim(out, {"a": 1})
    with pytest.raises(ConfigError, match="another evaluation"):
        run.claim(out, {"a": 2})


@pytest.mark.parametrize("name", [run.RUN, "arms/yarn/rope", "arms/yarn/a0.npy", "arms/yarn/g.json"])
def test_what_is_cut_off_is_told_with_what_to_do(name: str, plan: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run.ask({"yarn": plan()}, REQUESTS, out, tell=lambda _: None)
    (out / name).write_bytes((out / name).read_bytes()[:1])

    def again() -> None:
        found = run.ask({"yarn": plan()}, REQUESTS, out, tell=lambda _: None)["yarn"]
        found.logprobs("a0"), found.generated("g")

    with pytest.raises(ConfigError, match=rf"{name} cannot be read .* (Remove|Name another)") as told:
        again()
    if "Remove" in (said := str(told.value)):
        path = Path(said.partition("Remove ")[2].partition(",")[0])
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        again()
