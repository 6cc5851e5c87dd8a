"""An engine that listens to other machines: who gets in, how much they may send, and what must not be written down."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.served import Served

KEY = "0123456789abcdef-THE-KEY"
PROMPT = "the-secret-of-the-prompt"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("safety")
    key = folder / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    options = (
        "--host",
        "0.0.0.0",
        "--api-key-file",
        str(key),
        "--max-request-bytes",
        "4000",
        "--context",
        "1024",
        "--kv-cache-memory",
        "256MiB",
    )
    with Served(folder, "tiny-hybrid", "--draft", "none", *options) as server:
        server.wait_ready()  # the launcher's own canary has the key
        yield server
        server.stop()


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


BODY = {"model": "tiny-hybrid", "prompt": PROMPT, "max_tokens": 4}
LET_IN = {"Authorization": f"Bearer {KEY}"}


def test_who_gets_in(client: httpx.Client) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/invocations"):
        assert client.post(path, json=BODY).status_code == 401
        assert client.post(path, json=BODY, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/v1/models").status_code == 401
    assert client.post("/v1/completions", json=BODY, headers=LET_IN).status_code == 200
    assert client.get("/health").status_code == 200
    assert client.get("/metrics").status_code == 200  # from this machine


def test_how_much_may_be_sent(client: httpx.Client) -> None:
    long = {**BODY, "prompt": "x" * 4000}
    assert client.post("/v1/completions", json=long, headers=LET_IN).status_code == 413
    chunks = (piece for piece in [json.dumps(long).encode()[:3000], json.dumps(long).encode()[3000:]])
    kind = {"content-type": "application/json"}
    assert client.post("/v1/completions", content=chunks, headers={**LET_IN, **kind}).status_code == 413
    deep = client.post("/v1/completions", json={**BODY, "prompt": "x " * 1900}, headers=LET_IN)
    assert deep.status_code == 400
    assert "1024" in deep.text


def test_what_is_not_written_down(served: Served, client: httpx.Client) -> None:
    wrong = {**BODY, "temperature": "hot", "prompt": [PROMPT, 7]}
    assert client.post("/v1/completions", json=wrong, headers=LET_IN).status_code == 400
    assert client.post("/v1/completions", json=BODY, headers=LET_IN).status_code == 200
    processes = [psutil.Process(served.process.pid), *psutil.Process(served.process.pid).children(recursive=True)]
    assert len(processes) > 2
    seen = [" ".join(process.cmdline()) for process in processes]
    seen += [served.log.read_text(), served.stderr.read_text(), json.dumps(served.ready)]
    runtime = served.log.parent / "run"
    status = [sys.executable, "-m", "thor_spec", "status", "--json"]
    env = {**os.environ, "THOR_SPEC_RUNTIME_DIR": str(runtime)}
    seen.append(subprocess.run(status, env=env, capture_output=True, text=True, check=True).stdout)
    seen += [path.read_text(errors="replace") for path in Path(runtime).rglob("*") if path.is_file()]
    for text in seen:
        assert KEY not in text
        assert PROMPT not in text
    assert served.log.stat().st_mode & 0o077 == 0
    assert "POST /v1/completions" in served.log.read_text()  # that somebody asked is written down
