"""The launcher as a process: signals, a second start, a crash, and what is left behind (nothing)."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.checkpoints import MakeCheckpoint
from tests.e2e.served import Served
from thor_spec.nano import checkpoints as nano

NO_DRAFT = ("tiny-dense", "--draft", "none", "--context", "512", "--kv-cache-memory", "256MiB")


def thor_spec(runtime: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "THOR_SPEC_RUNTIME_DIR": str(runtime)}
    return subprocess.run([sys.executable, "-m", "thor_spec", *args], capture_output=True, text=True, env=env)


def tree(served: Served) -> list[psutil.Process]:
    return psutil.Process(served.process.pid).children(recursive=True)


def assert_nothing_left(served: Served, processes: list[psutil.Process], runtime: Path) -> None:
    assert [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", served.port))
    assert json.loads(thor_spec(runtime, "status", "--json").stdout)["held"] is False
    assert not list(runtime.glob("receipts-*"))


def test_from_start_to_stop_with_a_second_start_between(tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    with Served(tmp_path / "a", *NO_DRAFT, runtime=runtime, workers=True) as served:
        served.wait_phase("start")
        while not tree(served):
            time.sleep(0.01)
        with Served(tmp_path / "b", *NO_DRAFT, runtime=runtime) as second:
            assert second.process.wait(10) == 10
            assert f"pid {served.process.pid}" in second.stderr.read_text()
            assert not second.log.exists()
        served.wait_ready()
        shown = json.loads(thor_spec(runtime, "status", "--json").stdout)
        assert (shown["holder"]["pid"], shown["holder"]["phase"]) == (served.process.pid, "ready")
        assert shown["holder"]["url"] == served.url
        processes = tree(served)
        assert len(processes) >= 4  # shim, API server, engine, worker
        assert served.stop(signal.SIGTERM) == 0
        assert_nothing_left(served, processes, runtime)


def test_stop_from_another_terminal_during_the_load(tmp_path: Path) -> None:
    with Served(tmp_path / "a", *NO_DRAFT) as served:
        served.wait_phase("weights")
        processes = tree(served)
        done = thor_spec(tmp_path / "a" / "run", "stop")
        assert done.returncode == 0
        assert f"(pid {served.process.pid})" in done.stdout
        assert served.process.wait(5) == 0
        assert_nothing_left(served, processes, tmp_path / "a" / "run")


def test_an_engine_killed_while_serving(tmp_path: Path) -> None:
    with Served(tmp_path / "a", *NO_DRAFT, workers=True) as served:
        served.wait_ready()
        processes = tree(served)
        (engine,) = [p for p in processes if p.cmdline()[:1] == ["VLLM::EngineCore"]]
        engine.kill()
        assert served.process.wait(60) == 32
        assert "thor-spec: The engine ended while it was serving" in served.stderr.read_text()
        assert "the engine's process was killed, or crashed without a word" in served.stderr.read_text()
        assert "Traceback" not in served.stderr.read_text()
        assert_nothing_left(served, processes, tmp_path / "a" / "run")


def test_a_checkpoint_whose_weights_do_not_fit_its_config(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    config = json.loads((nano.ensure("tiny-dense") / "config.json").read_text())
    path = make_checkpoint("misfit", config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((nano.ensure("tiny-dense") / name).read_bytes())
    with Served(tmp_path / "a", str(path), "--draft", "none", "--context", "512") as served:
        assert served.process.wait(120) == 20
        text = served.stderr.read_text()
        assert "thor-spec: The engine ended before it was ready" in text
        assert "Traceback" not in text
        assert str(served.log) in text
        assert_nothing_left(served, [], tmp_path / "a" / "run")


def test_without_a_model_the_bundled_pair_is_served(tmp_path: Path) -> None:
    with Served(tmp_path / "a", "--context", "1024", "--kv-cache-memory", "256MiB") as served:
        ready = served.wait_ready().ready
        assert (ready["model"], ready["drafter"], ready["draft_tokens"]) == ("nano-hybrid", "nano-dflash", 7)
        asked = {"model": "nano-hybrid", "messages": [{"role": "user", "content": "Say hello."}], "temperature": 0}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=asked, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "Hello!"
        assert served.stop() == 0


@pytest.mark.parametrize("bad", ["--max-num-batched-tokens=none", "--no-such-flag"])
def test_an_argument_that_vllm_refuses(tmp_path: Path, bad: str) -> None:
    with Served(tmp_path / "a", *NO_DRAFT, "--", bad) as served:
        assert served.process.wait(120) == 20
        assert bad.split("=")[0] in served.stderr.read_text()
