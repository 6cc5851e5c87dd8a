"""ASGI middleware of vLLM's API server: takes ``thor_spec`` out of request bodies and labels what comes back.

A body's ``{"thor_spec": {"accept": "typical"}}``, or ``{"mode": "speed"}`` to a block-diffusion model, is checked here,
where a mistake is answered with 400, and travels on as ``vllm_xargs``. Each answer says in a header how its tokens came
about.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from thor_spec import json_text
from thor_spec.config import CACHED_CONTROLS, CONTROLS
from thor_spec.dflash.acceptance import Acceptance
from thor_spec.diffusion.settings import Denoising
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import metrics, recorder
from thor_spec.vllm_plugin.gate import path_of
from thor_spec.vllm_plugin.options import (
    CONTROL_KEY,
    DENOISE_KEYS,
    NAME,
    REQUEST_KEYS,
    TREE_KEY,
    TREES,
    PluginOptions,
)

Rule = Acceptance | Denoising
HEADERS: dict[type, bytes] = {Acceptance: b"x-thor-spec-accept", Denoising: b"x-thor-spec-denoise"}
_KEYS: dict[type, dict[str, str]] = {
    kind: {name: key for key, name in keys.items()}
    for kind, keys in ((Acceptance, REQUEST_KEYS), (Denoising, DENOISE_KEYS))
}
# vLLM has no way to carry options there, and would drop them in silence.
_WITHOUT_OPTIONS = ("/v1/chat/completions/batch", "/inference/v1/generate")
_CARRYING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/invocations")
_PATHS = (*_CARRYING, *_WITHOUT_OPTIONS)


class FrontDoor:
    """Stands before vLLM's application; vLLM is started with ``--middleware`` and this class's name."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._options: PluginOptions | None = None
        self._default: Rule = Acceptance()
        self._controls: Collection[str] = ()
        self._recorder: recorder.Recorder | None = None
        metrics.register()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["method"] != "POST" or (path := path_of(scope)) not in _PATHS:
            await self._app(scope, receive, send)
            return
        body = await _whole(receive)
        self._read_options(scope)
        asked, rule = body, self._default
        if _may_name_us(body):
            try:
                body, rule = rewritten(body, rule, path=path, controls=self._controls)
            except ConfigError as error:
                await _refuse(send, str(error))
                return
            scope = {**scope, "headers": [*_without_length(scope), (b"content-length", str(len(body)).encode())]}
        label = (HEADERS[type(rule)], rule.described.encode())

        async def labelled(message: Any) -> None:
            if message["type"] == "http.response.start":
                if self._recorder is not None and path == recorder.PATH and message["status"] == 200:
                    self._recorder.add(asked)  # what was refused would end a replay
                message = {**message, "headers": [*message.get("headers", ()), label]}
            await send(message)

        await self._app(scope, _replay(body, receive), labelled)

    def _read_options(self, scope: Any) -> None:
        if self._options is None:  # the application knows its configuration only once it serves
            config = scope["app"].state.vllm_config
            self._options = options = PluginOptions.parse(config.additional_config)
            self._default = options.denoising if config.model_config.is_diffusion else options.acceptance
            if options.record:
                self._recorder = recorder.Recorder(Path(options.record), contents=options.record_contents)
            if options.controls:
                self._controls = CACHED_CONTROLS if config.cache_config.enable_prefix_caching else CONTROLS


def _may_name_us(body: bytes) -> bool:
    """Return whether our name may be in a body: as it is, or as JSON may write it, escaped or in UTF-16 or UTF-32."""
    return b"thor_spec" in body or b"\\u" in body or b"\0" in body


def rewritten(
    body: bytes, default: Rule, *, path: str = "/v1/completions", controls: Collection[str] = ()
) -> tuple[bytes, Rule]:
    """Return the body with its ``thor_spec`` in ``vllm_xargs``, and the rule. Raises: ConfigError, naming the field.

    ``controls`` are the corruptions that may be asked for. A body that is not a JSON object passes as it is: vLLM's own
    answer to it is better than ours. What is ours in ``vllm_xargs`` is refused: it would change how tokens come about
    without a check, and the label would not know.
    """
    try:
        request = json_text.loads(body)
    except ValueError:
        return body, default
    if not isinstance(request, dict):
        return body, default
    _require_none_of_ours(request)
    given = request.pop(NAME, None)
    if given is None:  # which clients also write for what is not set
        return body, default
    if path in _WITHOUT_OPTIONS:
        raise ConfigError(f"{path} takes no {NAME} options. Set them for the server, or ask at another path.")
    if not isinstance(given, dict):
        example = '{"accept": "exact"}' if isinstance(default, Acceptance) else '{"mode": "speed"}'
        raise ConfigError(f"{NAME} must be an object such as {example}, not {type(given).__name__}.")
    control = given.pop("control", None) if controls else None
    if control is not None and control not in controls:
        raise ConfigError(f"control={control!r} is not one of {', '.join(controls)}.")
    if control in CACHED_CONTROLS and not request.get("cache_salt"):
        raise ConfigError(f"control={control} needs a cache_salt of its own: others would be given what it corrupts.")
    tree = given.pop("tree", "on") if isinstance(default, Acceptance) else "on"
    if tree not in TREES:
        raise ConfigError(f"tree={tree!r} is not one of {', '.join(TREES)}.")
    rule: Rule = default.of_request(given)
    extra = request.get("vllm_xargs") or {}
    if not isinstance(extra, dict):
        raise ConfigError(f"vllm_xargs must be an object, not {type(extra).__name__}.")
    names = _KEYS[type(rule)]
    # Flat values only: no editing, which is null here, is a threshold that no probability exceeds.
    said = {names[name]: 1.0 if value is None else value for name, value in given.items()}
    planted = {**({CONTROL_KEY: control} if control else {}), **({TREE_KEY: tree} if tree != "on" else {})}
    request["vllm_xargs"] = {**extra, **said, **planted}
    return json.dumps(request).encode(), rule


def _require_none_of_ours(request: dict[str, Any]) -> None:
    """Raise ConfigError, where a client has written what is ours to write into vLLM's own arguments."""
    params = request.get("sampling_params")  # of requests by token ids
    given = {
        "vllm_xargs": request.get("vllm_xargs"),
        "extra_args": params.get("extra_args") if isinstance(params, dict) else None,
    }
    for name, extra in given.items():
        if isinstance(extra, dict) and (ours := [key for key in extra if key.startswith(NAME)]):
            raise ConfigError(f"{name} takes no {', '.join(ours)}. Say it as {NAME}, beside {name}.")


async def _whole(receive: Any) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return b"".join(parts)


def _replay(body: bytes, receive: Any) -> Any:
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()  # a disconnect, once the client has gone
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _without_length(scope: Any) -> list[Any]:
    return [(name, value) for name, value in scope["headers"] if name != b"content-length"]


async def _refuse(send: Any, why: str) -> None:
    error = {"message": why, "type": "BadRequestError", "param": NAME, "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
