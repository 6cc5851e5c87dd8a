"""The health check of containers: a request, over an engine that answers, hangs up, or is not there."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

KEY = "0123456789abcdef"


class Engine(BaseHTTPRequestHandler):
    tokens: tuple[int, ...] = (5,)

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert (body["model"], body["max_tokens"]) == ("m", 1)
        self.answer({"choices": [{"token_ids": list(self.tokens)}]})

    def answer(self, content: Any) -> None:
        self.send_response(200 if self.headers["Authorization"] == f"Bearer {KEY}" else 401)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def check(url: str, key: str = KEY) -> tuple[int, str]:
    argv = [sys.executable, "-m", "thor_spec.serve.healthcheck", url]
    done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "VLLM_API_KEY": key})
    return done.returncode, done.stderr


def test_an_engine_that_answers(url: str) -> None:
    assert check(url) == (0, "")


def test_without_the_key(url: str) -> None:
    code, err = check(url, "")
    assert code == 1
    assert "answered 401" in err


def test_an_engine_that_gives_no_token(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "tokens", ())
    assert check(url)[0] == 1


def test_nobody_there() -> None:
    code, err = check("http://127.0.0.1:9")
    assert code == 1
    assert err.startswith("thor-spec: http://127.0.0.1:9/v1/models does not name a model")
    assert err.count("\n") == 1
