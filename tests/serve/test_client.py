"""A server as its judges see it: where none answers, nothing was judged."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from thor_spec.cli.judged import Servers
from thor_spec.cli.main import main
from thor_spec.errors import ConfigError, ThorSpecError
from thor_spec.serve.client import Server

CARD = b'{"data": [{"id": "m"}]}'


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    """Answer every GET with this, and break every POST off."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.connection.shutdown(socket.SHUT_RDWR)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("command", ["verify lossless", "verify all", "bench chat", "bench serving"])
def test_no_server_is_no_red_gate(command: str, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--url", f"http://127.0.0.1:{port}"])
    assert ended.value.code == 2
    assert "does not answer" in (said := capsys.readouterr().err)
    assert "--url" in said


@pytest.mark.parametrize(("body", "status"), [(b"", 503), (b"<html>", 200), (b"[]", 200), (b'{"data": []}', 200)])
def test_what_is_no_vllm_is_refused(body: bytes, status: int) -> None:
    with answering(body, status) as url, pytest.raises(ConfigError, match=r"Name the address|does not answer"):
        Server(url)


def test_an_address_that_knows_no_models_is_told_in_a_line() -> None:
    with answering(b"", 404) as url, pytest.raises(ConfigError) as refused:
        Server(f"{url}/v1")
    assert str(refused.value).startswith(f"{url}/v1/v1/models does not answer (404 Not Found). ")
    assert "\n" not in str(refused.value)


def test_a_connection_that_breaks_ends_in_one_full_stop() -> None:
    with answering(CARD) as url, Server(url) as server, pytest.raises(ThorSpecError) as broken:
        server.complete("hello")
    assert str(broken.value).endswith(" failed: Server disconnected without sending a response.")


def test_a_reference_that_does_not_answer(port: int) -> None:
    flags = dict.fromkeys(("model", "draft", "draft_tokens", "kv_cache_memory"))
    servers = Servers(flags, None, (), url="http://127.0.0.1:1", reference_url=f"http://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="does not answer"):
        servers.subject().references["plain"].visit(lambda server: server)  # type: ignore[union-attr]
