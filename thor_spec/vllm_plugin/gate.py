"""ASGI middleware of vLLM's API server: who may ask, and how much.

vLLM checks its key on ``/v1`` and a few more paths, and leaves others open that run the model (``/invocations``) or
show it (``/tokenize``). Here every path needs the key but ``/health``, and ``/metrics`` for this machine itself. A body
is counted as it comes, so that one without a length cannot fill memory either.
"""

import hashlib
import hmac
import json
from typing import Any

from thor_spec import env
from thor_spec.vllm_plugin.options import PluginOptions

KEY_VARIABLE = "VLLM_API_KEY"
_LOOPBACK = ("127.0.0.1", "::1")


class Gate:
    """Stands before everything else; vLLM is started with ``--middleware`` and this class's name, last."""

    def __init__(self, app: Any) -> None:
        self._app = app
        key = env.engine_variable(KEY_VARIABLE)
        self._key = _digest(key.encode()) if key else None
        self._limit: int | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])  # names are lower case in ASGI
        if self._key is not None and not _is_open(scope) and not self._knows(headers.get(b"authorization", b"")):
            await _refuse(scope, send, 401, "This server needs its API key: Authorization: Bearer KEY.")
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        limit = self._limit_of(scope)
        if (length := headers.get(b"content-length", b"")).isdigit() and int(length) > limit:
            await _refuse(scope, send, 413, _too_long(limit))
            return
        await self._counted(scope, receive, send, limit)

    async def _counted(self, scope: Any, receive: Any, send: Any, limit: int) -> None:
        came, refused = 0, False

        async def counting() -> Any:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > limit:
                raise _TooLong
            return message

        async def answering(message: Any) -> None:
            nonlocal refused
            if came <= limit:
                await send(message)
            elif not refused:  # the application made an answer of its own out of the error
                refused = True
                await _refuse(scope, send, 413, _too_long(limit))

        try:
            await self._app(scope, counting, answering)
        except _TooLong:
            await answering({})

    def _limit_of(self, scope: Any) -> int:
        if self._limit is None:  # the application knows its configuration only once it serves
            config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
            if config is None:
                return PluginOptions().max_request_bytes
            self._limit = PluginOptions.parse(config.additional_config).max_request_bytes
        return self._limit

    def _knows(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and bool(hmac.compare_digest(_digest(key.strip()), self._key or b""))


class _TooLong(Exception):
    """The body passed the limit while it was read."""


def path_of(scope: Any) -> str:
    """Return a connection's path as vLLM knows it: servers put their ``--root-path`` before it."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_open(scope: Any) -> bool:
    if scope["type"] != "http":
        return False
    path = path_of(scope)
    if scope["method"] == "OPTIONS" or path == "/health":
        return True
    client, server = scope.get("client") or ("",), scope.get("server") or ("?",)
    here = client[0] in _LOOPBACK or client[0] == server[0]  # a machine that calls itself comes from where it calls
    return path in ("/metrics", "/metrics/") and here


def _too_long(limit: int) -> str:
    return f"The request is longer than {limit} bytes, the limit of --max-request-bytes."


async def _refuse(scope: Any, send: Any, status: int, why: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    kind = "AuthenticationError" if status == 401 else "BadRequestError"
    body = json.dumps({"error": {"message": why, "type": kind, "param": None, "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
