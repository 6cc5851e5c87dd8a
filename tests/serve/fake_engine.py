"""Stands in for vLLM: speaks as much of its API as a launcher uses, and misbehaves on request."""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from thor_spec.vllm_plugin import receipt

PORT, FAULTS = int(sys.argv[1]), set(sys.argv[2:])
calls = {"completions": 0, "drafts": 0}


def leave(state: Any, **fields: Any) -> None:
    receipt.leave(receipt.Receipt(pid=os.getpid(), state=state, **fields))


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer("")
        else:
            self.answer(
                "# TYPE vllm:spec_decode_num_drafts_total counter\n"
                f"vllm:spec_decode_num_drafts_total {calls['drafts']}\n"
                "# TYPE vllm:cache_config_info gauge\n"
                'vllm:cache_config_info{kv_cache_size_tokens="4096",kv_cache_max_concurrency="2.0"} 1\n'
            )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "hang in canary" in FAULTS:
            time.sleep(60)
        if "die in canary" in FAULTS:
            print("RuntimeError: the kernel gave up", flush=True)
            os._exit(3)
        if "no drafts" not in FAULTS:
            calls["drafts"] += 4
        if self.path == "/v1/chat/completions":
            zone = "Mars" if "bad tool call" in FAULTS else "UTC"
            call = {"function": {"name": "time", "arguments": json.dumps({"zone": zone})}}
            self.answer(json.dumps({"choices": [{"message": {"tool_calls": [call]}}]}))
            return
        calls["completions"] += 1
        unlike = "nondeterministic" in FAULTS or ("tie beside a neighbour" in FAULTS and calls["completions"] == 1)
        tokens = [calls["completions"] if unlike else 5] * body["max_tokens"]
        choice = {"token_ids": tokens[:-1] if "short answer" in FAULTS else tokens}
        if body.get("stream"):
            self.answer(f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n")
        else:
            self.answer(json.dumps({"choices": [choice]}))

    def answer(self, text: str) -> None:
        self.send_response(500 if "errors" in FAULTS and self.command == "POST" else 200)
        self.end_headers()
        self.wfile.write(text.encode())


print("INFO Loading model from scratch...", flush=True)
if "seam moved" in FAULTS:
    leave("failed", error="a seam moved", exit_code=13)
    time.sleep(60)
if "die in load" in FAULTS:
    print("Traceback (most recent call last):\nValueError: no such tensor: lm_head\nRuntimeError: echo", flush=True)
    sys.exit(1)
if "hang in load" in FAULTS:
    time.sleep(60)
if "deaf" in FAULTS:
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "child" in FAULTS:
    subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(60)"])
print("INFO init engine (profile, create kv cache, warmup model) took 1.0 s", flush=True)
if "no plugin" not in FAULTS:
    leave("engine", model_state="ThorHybridModelState")
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
