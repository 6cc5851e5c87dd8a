"""The middleware that stands first: keys, open paths, and the size of bodies; under the framework that vLLM uses."""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from thor_spec.vllm_plugin.gate import Gate

KEY = "a-key-of-sixteen-or-more"


class App:
    """Reads the whole body, as vLLM's does, and says what came."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(
            vllm_config=SimpleNamespace(additional_config={"thor_spec": {"max_request_bytes": 100}})
        )
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"fine"})


Ask = Callable[..., tuple[int, bytes]]


@pytest.fixture
def app() -> App:
    return App()


def asking(gate: Gate, app: App) -> Ask:
    def ask(
        path: str, *pieces: bytes, method: str = "POST", client: str = "10.0.0.9", **headers: str
    ) -> tuple[int, bytes]:
        sent: list[Any] = []
        waiting = [
            {"type": "http.request", "body": piece, "more_body": i + 1 < len(pieces)} for i, piece in enumerate(pieces)
        ] or [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            return waiting.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": raw, "client": (client, 5), "app": app}
        asyncio.run(gate({**scope, "server": ("10.0.0.1", 8000)}, receive, send))
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        return sent[0]["status"], sent[1]["body"]

    return ask


@pytest.fixture
def locked(app: App, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    return asking(Gate(app), app)


@pytest.fixture
def unlocked(app: App, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return asking(Gate(app), app)


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/tokenize", "/metrics", "/docs", "/healthy"])
def test_every_path_needs_the_key(locked: Ask, app: App, path: str) -> None:
    assert locked(path)[0] == 401
    assert locked(path, authorization=f"Bearer {KEY}x")[0] == 401
    assert locked(path, authorization=KEY)[0] == 401
    assert locked(path, authorization="Bearer ")[0] == 401
    assert app.bodies == []
    assert locked(path, authorization=f"bearer {KEY}")[0] == 200


def test_open_paths(locked: Ask) -> None:
    assert locked("/health", method="GET")[0] == 200
    assert locked("/v1/completions", method="OPTIONS")[0] == 200
    for here in ("127.0.0.1", "::1", "10.0.0.1"):
        assert locked("/metrics", method="GET", client=here)[0] == 200
        assert locked("/v1/models", method="GET", client=here)[0] == 401


def test_without_a_key_all_are_let_in(unlocked: Ask) -> None:
    assert unlocked("/v1/completions", b"x") == (200, b"fine")


def test_a_long_body_is_refused_by_its_length(unlocked: Ask, app: App) -> None:
    status, body = unlocked("/v1/completions", content_length="101")
    assert status == 413
    assert "100 bytes" in json.loads(body)["error"]["message"]
    assert app.bodies == []
    assert unlocked("/v1/completions", b"x" * 100, content_length="100")[0] == 200


@pytest.mark.parametrize("length", [{}, {"content_length": "7"}, {"content_length": "x"}])
def test_a_body_that_hides_its_length_is_counted(unlocked: Ask, app: App, length: dict[str, str]) -> None:
    assert unlocked("/v1/completions", *[b"x" * 60] * 9, **length)[0] == 413
    assert app.bodies == []


def test_under_starlette_the_last_one_stands_first_and_413_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM adds middlewares in the order of its arguments. FastAPI turns an error while it reads into a 400."""
    from fastapi import FastAPI, Request
    from fastapi.testclient import TestClient

    monkeypatch.setenv("VLLM_API_KEY", KEY)
    seen: list[str] = []

    class Inner:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["type"])
            await self.app(scope, receive, send)

    server = FastAPI()
    server.add_middleware(Inner)
    server.add_middleware(Gate)
    server.state.vllm_config = SimpleNamespace(additional_config={"thor_spec": {"max_request_bytes": 100}})

    @server.post("/v1/completions")
    async def complete(request: dict[str, Any], raw: Request) -> dict[str, Any]:
        return {"got": len(request)}

    client = TestClient(server)
    assert client.post("/v1/completions", json={}).status_code == 401
    assert seen == []
    headers = {"Authorization": f"Bearer {KEY}", "content-type": "application/json"}
    assert client.post("/v1/completions", json={"a": 1}, headers=headers).json() == {"got": 1}
    chunks = (b'{"a": "' + b"x" * 90 for _ in range(3))
    assert client.post("/v1/completions", content=chunks, headers=headers).status_code == 413
