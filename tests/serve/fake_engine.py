"""Stands in for vLLM: speaks as much of its API as a launcher uses, and misbehaves on request.

    fake_engine.py PORT [FAULT]... [control=FILE]

Faults named in FILE, one a line, begin when they are written there: an engine can turn bad while it serves.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from thor_spec.vllm_plugin import receipt

PORT, GIVEN = int(sys.argv[1]), set(sys.argv[2:])
CONTROL = [Path(given.removeprefix("control=")) for given in GIVEN if given.startswith("control=")]
ENGINE = 0
LOST_WORKER = "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."
calls = {"completions": 0, "drafts": 0, "tokens": 0}


def faults() -> set[str]:
    written = {line for path in CONTROL if path.exists() for line in path.read_text().splitlines()}
    return GIVEN | written


def leave(state: Any, **fields: Any) -> None:
    receipt.leave(receipt.Receipt(pid=os.getpid(), state=state, **fields))


def metrics() -> str:
    now = faults()
    tokens = 0 if "counters restart" in now else calls["tokens"]
    running = 1 if "stuck running" in now else 0
    waiting = 3 if "stuck waiting" in now else 0
    drafted = 64 * calls["drafts"]
    accepted = 0 if "none accepted" in now else drafted if "all accepted" in now else drafted // 2
    return (
        "# TYPE vllm:spec_decode_num_drafts counter\n"
        f"vllm:spec_decode_num_drafts_total {calls['drafts']}\n"
        "# TYPE vllm:spec_decode_num_draft_tokens counter\n"
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}\n'
        "# TYPE vllm:spec_decode_num_accepted_tokens counter\n"
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}\n'
        "# TYPE vllm:iteration_tokens_total histogram\n"
        f'vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf"}} {tokens}\n'
        f'vllm:iteration_tokens_total_count{{engine="0"}} {tokens}\n'
        f'vllm:iteration_tokens_total_sum{{engine="0"}} {tokens}\n'
        "# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0"}} {running}\n'
        "# TYPE vllm:num_requests_waiting gauge\n"
        f'vllm:num_requests_waiting{{engine="0"}} {waiting}\n'
        "# TYPE vllm:kv_cache_usage_perc gauge\n"
        f'vllm:kv_cache_usage_perc{{engine="0"}} {0.25 if running else 0.0}\n'
        "# TYPE vllm:cache_config_info gauge\n"
        'vllm:cache_config_info{kv_cache_size_tokens="4096",kv_cache_max_concurrency="2.0"} 1\n'
    )


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer("")
            return
        if "metrics fail" in faults():
            self.send_error(503)
            return
        self.answer(metrics())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        now = faults()
        if "hang in canary" in now:
            time.sleep(60)
        if "die in canary" in now:
            print("RuntimeError: the kernel gave up", flush=True)
            os._exit(3)
        if "lose a worker in canary" in now:
            lose_worker(ends="and stay" not in now)
            self.send_error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
            return
        if "refuse" in now:
            self.send_error(500)
            return
        if "no drafts" not in now:
            calls["drafts"] += 4
        if self.path == "/v1/chat/completions":
            zone = "Mars" if "bad tool call" in now else "UTC"
            call = {"function": {"name": "now", "arguments": json.dumps({"tz": zone})}}
            self.answer(json.dumps({"choices": [{"message": {"tool_calls": [call]}}]}))
            return
        calls["completions"] += 1
        calls["tokens"] += body["max_tokens"]
        unlike = "nondeterministic" in now or ("tie beside a neighbour" in now and calls["completions"] == 1)
        unlike |= "long prompts differ" in now and isinstance(body.get("prompt"), list)
        tokens = [calls["completions"] if unlike else 5] * body["max_tokens"]
        choice = {"token_ids": tokens[:-1] if "short answer" in now else tokens, "text": "as ever, and more"}
        choice["prompt_token_ids"] = [7, 8, 9]
        if "no choices" in now:
            self.answer('{"object": "error"}')
        elif body.get("stream") and "stream breaks off" in now:
            self.answer('data: {"error": {"message": "EngineCore died"}}\n\ndata: [DONE]\n\n')
        elif body.get("stream"):
            self.answer(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n")
        else:
            self.answer(json.dumps({"choices": [choice]}))

    def answer(self, text: str) -> None:
        self.send_response(500 if "errors" in faults() and self.command == "POST" else 200)
        self.end_headers()
        self.wfile.write(text.encode())


def lose_worker(*, ends: bool) -> None:
    """Die as vLLM does when a worker was killed: requests fail at once, and the server ends a moment later."""
    if "say nothing" not in GIVEN:
        print("ERROR 11-29 20:00:00 [multiproc_executor.py:1] " + LOST_WORKER, flush=True)
    if ENGINE:
        os.kill(ENGINE, signal.SIGKILL)
    if ends:
        threading.Timer(1.0, os._exit, [1]).start()


def spin() -> None:
    """Use CPU time for as long as "spin" is written: an engine that is busy and does not answer."""
    while True:
        if "spin" in faults():
            sum(range(20_000))
        else:
            time.sleep(0.02)


print("INFO Loading model from scratch...", flush=True)
if "seam moved" in GIVEN:
    leave("failed", error="a seam moved", exit_code=13)
    time.sleep(60)
if "die in load" in GIVEN:
    print("Traceback (most recent call last):\nValueError: no such tensor: lm_head\nRuntimeError: echo", flush=True)
    sys.exit(1)
if "old ptxas" in GIVEN:
    print("ptxas fatal   : Value 'sm_110a' is not defined for option 'gpu-name'\nRuntimeError: echo", flush=True)
    sys.exit(1)
if "hang in load" in GIVEN:
    print("ERROR 11-29 20:00:00 [loader.py:1] shard 3 of 9 does not answer", flush=True)
    time.sleep(60)
if "crawl" in GIVEN:
    print("INFO [Autotuner]: Autotuning process starts ...", flush=True)
    time.sleep(60)
if "deaf" in GIVEN:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "child" in GIVEN:
    subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(60)"])
print("INFO init engine (profile, create kv cache, warmup model) took 1.0 s", flush=True)
if "engine apart" in GIVEN and (ENGINE := os.fork()) == 0:
    leave("engine", model_state="ThorHybridModelState")
    while True:
        time.sleep(60)
elif "no plugin" not in GIVEN and "engine apart" not in GIVEN:
    leave("engine", model_state="ThorHybridModelState")
while "engine apart" in GIVEN and not receipt.collect(Path(os.environ["THOR_SPEC_RECEIPTS"])):
    time.sleep(0.01)
if CONTROL:
    threading.Thread(target=spin, daemon=True).start()
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
