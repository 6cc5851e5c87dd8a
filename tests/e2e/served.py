"""``thor-spec serve`` as a person starts it, in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import httpx

READY_TIMEOUT_S = 240
STOP_TIMEOUT_S = 30  # what serve promises
ROOT = Path(__file__).parent.parent.parent


def command(folder: Path) -> list[str]:
    """Return ``thor-spec`` as it is called beside other tests' engines."""
    folder.mkdir(parents=True, exist_ok=True)
    return [sys.executable, "-m", "tests.e2e.launcher", str(folder / "memory")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Served:
    """One launcher; ``ready`` is its report, ``stderr`` a file."""

    def __init__(self, folder: Path, *args: str, runtime: Path | None = None, workers: bool = False) -> None:
        """Start it; ``workers``: in as many processes as vLLM starts by itself."""
        start = command(folder)
        self.port = free_port()
        self.log = folder / "engine.log"
        self.stderr = folder / "stderr"
        head, passed = (args[: args.index("--")], args[args.index("--") :]) if "--" in args else (args, ())
        options = ("--port", str(self.port), "--log-file", str(self.log), "--json")
        self._errors = self.stderr.open("w")
        env = {**os.environ, "THOR_SPEC_RUNTIME_DIR": str(runtime or folder / "run")}
        if workers:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self.process = subprocess.Popen(
            [*start, "serve", *head, *options, *passed],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=env,
        )
        self.ready: dict[str, Any] = {}

    def wait_ready(self) -> Self:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, (
            f"never ready: {self.stderr.read_text()}\n{self.log.read_text()[-4000:] if self.log.exists() else ''}"
        )
        self.ready = json.loads(line)
        return self

    def wait_phase(self, name: str) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while f"] {name}" not in self.stderr.read_text():
            assert self.process.poll() is None, self.stderr.read_text()
            assert time.monotonic() < deadline, self.stderr.read_text()
            time.sleep(0.02)

    def metric(self, name: str) -> float:
        """One figure once it has settled: the engine answers first and publishes then."""
        now = self._metric(name)
        while now != (later := self._metric(name)):
            now = later
        return now

    def _metric(self, name: str) -> float:
        from thor_spec.serve.metrics import totals

        time.sleep(0.15)
        return totals(self.metrics()).get(name, 0.0)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=60).text

    def wait_metric(self, name: str, value: float, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while (now := self._metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self, signum: int = signal.SIGINT) -> int:
        self.process.send_signal(signum)
        return self.process.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._errors.close()
