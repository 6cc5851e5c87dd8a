"""Serve the bundled pairs on this machine, run the client tests against them, and keep what was seen.

    .venv/bin/python benchmarks/serve_check.py [--tests tests/e2e] [--repetitions 5]

Writes a record with READY's report, the phases of the start, greedy tokens per second with and without drafts at batch
1 and 8 (medians of interleaved repetitions), and the result of each test. No figure is reported when a test is red.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from record import summary, write

from thor_spec.bench.turns import turns

ROOT = Path(__file__).parent.parent
PORTS = {"drafts": 8131, "none": 8132}
TOKENS = 128
PROMPTS = [f"{text} {i}" for i, text in enumerate(("The river bends", "def area(", "Every morning", "A week has") * 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default="tiny-hybrid")
    parser.add_argument("--tests", nargs="*", default=["tests/e2e"])
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    result: dict[str, Any] = {"model": options.model, "tests": run_tests(options.tests)}
    bad = [name for name, outcome in result["tests"].items() if outcome in ("failed", "error")]
    if not bad:
        result |= measure(options.model, options.repetitions)
    print(json.dumps({key: value for key, value in result.items() if key != "tests"}, indent=1))
    outcomes = list(result["tests"].values())
    print(f"tests: {', '.join(f'{outcomes.count(o)} {o}' for o in sorted(set(outcomes)))}", *bad, sep="\n  ")
    print(write("serve-check", result))
    sys.exit(1 if bad else 0)


def run_tests(paths: list[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-s", f"--junitxml={report}", *paths], cwd=ROOT, check=False
        )
        cases = ElementTree.parse(report).iter("testcase")
        outcome = {"failure": "failed", "error": "error", "skipped": "not run"}
        return {
            f"{case.get('classname')}::{case.get('name')}": next(
                (outcome[child.tag] for child in case if child.tag in outcome), "passed"
            )
            for case in cases
        }


def measure(model: str, repetitions: int) -> dict[str, Any]:
    servers = {name: Server(model, name, port) for name, port in PORTS.items()}
    try:
        samples: dict[str, list[float]] = {f"{name} batch {n}": [] for name in servers for n in (1, 8)}
        for i, name in turns(servers, repetitions + 1):
            for n in (1, 8):
                rate = servers[name].tokens_per_second(n)
                if i:  # the first round warms up
                    samples[f"{name} batch {n}"].append(rate)
        return {
            "ready": {name: server.ready for name, server in servers.items()},
            "phases": {name: server.phases() for name, server in servers.items()},
            "tokens_per_second": {key: summary(values) for key, values in samples.items()},
            "samples": samples,
            "tokens_per_step": servers["drafts"].tokens_per_step(),
        }
    finally:
        for server in servers.values():
            server.stop()


class Server:
    """One ``thor-spec serve``; each has locks of its own, so that two can be compared in one run."""

    def __init__(self, model: str, name: str, port: int) -> None:
        self.model = model
        self.folder = tempfile.TemporaryDirectory()
        self.errors = (Path(self.folder.name) / "stderr").open("w+")
        draft = ["--draft", "none"] if name == "none" else []
        memory = ["--kv-cache-memory", str(2 << 30)]
        options = [*draft, *memory, "--port", str(port), "--context", "4096", "--json"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "thor_spec", "serve", model, *options],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "THOR_SPEC_RUNTIME_DIR": self.folder.name},
        )
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"never ready: {self.phases()}")
        self.ready: dict[str, Any] = json.loads(line)

    def tokens_per_second(self, batch: int) -> float:
        body = {"model": self.model, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}

        def ask(prompt: str) -> None:
            httpx.post(
                f"{self.ready['url']}/v1/completions", json={**body, "prompt": prompt}, timeout=600
            ).raise_for_status()

        began = time.monotonic()
        with ThreadPoolExecutor(batch) as pool:
            list(pool.map(ask, PROMPTS[:batch]))
        return batch * TOKENS / (time.monotonic() - began)

    def tokens_per_step(self) -> float:
        """Return emitted tokens per target step of a drafting server: 1 + accepted / drafted blocks."""
        from thor_spec.serve.metrics import totals

        found = totals(httpx.get(f"{self.ready['url']}/metrics").text)
        steps = found["vllm:spec_decode_num_drafts_total"]
        return round(1 + found["vllm:spec_decode_num_accepted_tokens_total"] / steps, 3)

    def phases(self) -> list[str]:
        self.errors.seek(0)
        return self.errors.read().splitlines()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        self.errors.close()
        self.folder.cleanup()


if __name__ == "__main__":
    main()
