"""What ``thor-spec serve`` costs over starting the same vLLM by hand: time to READY, and request latency.

    .venv/bin/python benchmarks/serve_overhead.py [--repetitions 5] [-- SERVE OPTIONS]

Both sides run the very same argv and environment, interleaved A B B A. By hand means: start it, poll ``/health``. READY
comes after the canary as well, whose time is also given apart.
"""

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from record import paired_ratio, summary, write

from thor_spec import env
from thor_spec.bench.turns import turns
from thor_spec.config import resolve
from thor_spec.serve.plan import Plan, make_plan

PORT = 8123
REQUESTS = 20
TOKENS = 32
TIMEOUT_S = 600
POLL_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--model", default="tiny-hybrid")
    parser.add_argument("vllm_args", nargs="*")
    options = parser.parse_args()
    plan = make_plan(
        resolve({"model": options.model, "port": PORT, "context": 2048, "vllm_args": tuple(options.vllm_args)})
    )
    sides = {"by hand": by_hand, "serve": served}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    by_hand(plan)  # warms caches for both
    for i, name in turns(sides, options.repetitions):
        sample = sides[name](plan)
        samples[name].append(sample)
        print(f"{i} {name:8} " + "  ".join(f"{key} {value:.3f}" for key, value in sample.items()), file=sys.stderr)
    column = {name: {key: [s[key] for s in got] for key in got[0]} for name, got in samples.items()}
    result = {
        "plan": plan.as_dict(),
        "samples": samples,
        "summary": {name: {key: summary(values) for key, values in keys.items()} for name, keys in column.items()},
        "ratio": {
            key: paired_ratio(column["serve"][key], column["by hand"][key])
            for key in ("healthy_s", "ready_s", "latency_s")
        },
    }
    print(json.dumps({"summary": result["summary"], "ratio": result["ratio"]}, indent=1))
    print(write("serve-overhead", result))


def by_hand(plan: Plan) -> dict[str, float]:
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        engine = subprocess.Popen(
            plan.argv, env=env.child_environment(plan.environment), stdout=log, stderr=log, start_new_session=True
        )
        try:
            while not healthy():
                if engine.poll() is not None or time.monotonic() - began > TIMEOUT_S:
                    raise SystemExit("the engine started by hand died")
                time.sleep(POLL_S)
            seconds = time.monotonic() - began
            return {"healthy_s": seconds, "ready_s": seconds, "latency_s": latency(plan)}
        finally:
            os.killpg(engine.pid, signal.SIGINT)
            engine.wait()
            wait_gone(engine.pid)


def served(plan: Plan) -> dict[str, float]:
    config = plan.resolved.config
    args = [config.model, "--port", str(PORT), "--context", "2048", "--json", "--", *config.vllm_args]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        errors = (Path(folder) / "stderr").open("w+")
        launcher = subprocess.Popen(
            [sys.executable, "-m", "thor_spec", "serve", *args], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert launcher.stdout
        if not launcher.stdout.readline():
            errors.seek(0)
            raise SystemExit(f"serve was never ready: {errors.read()}")
        seconds = time.monotonic() - began
        errors.seek(0)
        canary = next(line for line in errors if "] canary" in line)
        to_canary = float(canary.split()[1])
        try:
            return {"healthy_s": to_canary, "ready_s": seconds, "latency_s": latency(plan)}
        finally:
            launcher.send_signal(signal.SIGINT)
            launcher.wait()


def healthy() -> bool:
    """Ask as cheaply as the launcher does: on a small machine the asking slows the start."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


def latency(plan: Plan) -> float:
    """Return the median seconds of a greedy request, after two warm-ups."""
    body = {
        "model": plan.resolved.config.model,
        "prompt": "The river bends twice",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    seconds = []
    with httpx.Client(base_url=plan.url, timeout=TIMEOUT_S) as client:
        for _ in range(REQUESTS + 2):
            began = time.monotonic()
            client.post("/v1/completions", json=body).raise_for_status()
            seconds.append(time.monotonic() - began)
    return statistics.median(seconds[2:])


def wait_gone(group: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(POLL_S)
    os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
