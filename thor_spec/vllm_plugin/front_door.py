"""ASGI middleware of vLLM's API server: takes ``thor_spec`` out of request bodies and labels what comes back.

A body's ``{"thor_spec": {"accept": "typical"}}`` is checked here, where a mistake is answered with 400, and travels on
as ``vllm_xargs``. Each answer says in a header which rule its tokens came by, since a relaxed rule is not lossless.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any

from thor_spec.config import CONTROLS
from thor_spec.dflash.acceptance import RULES, Acceptance
from thor_spec.errors import ConfigError
from thor_spec.kernels.relax.reference import COUNTED
from thor_spec.vllm_plugin import counters
from thor_spec.vllm_plugin.options import CONTROL_KEY, NAME, REQUEST_KEYS, TREE_KEY, TREES, PluginOptions

HEADER = b"x-thor-spec-accept"
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


class FrontDoor:
    """Stands before vLLM's application; vLLM is started with ``--middleware`` and this class's name."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._options: PluginOptions | None = None
        _register_collector()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _PATHS:
            await self._app(scope, receive, send)
            return
        body = await _whole(receive)
        options = self._plugin_options(scope)
        rule = options.acceptance
        if b'"thor_spec"' in body:
            try:
                body, rule = rewritten(body, rule, controls=options.controls, trees=options.tree_shape is not None)
            except ConfigError as error:
                await _refuse(send, str(error))
                return
            scope = {**scope, "headers": [*_without_length(scope), (b"content-length", str(len(body)).encode())]}
        label = rule.described.encode()

        async def labelled(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, label)]}
            await send(message)

        await self._app(scope, _replay(body, receive), labelled)

    def _plugin_options(self, scope: Any) -> PluginOptions:
        if self._options is None:  # the application knows its configuration only once it serves
            self._options = PluginOptions.parse(scope["app"].state.vllm_config.additional_config)
        return self._options


def rewritten(
    body: bytes, default: Acceptance, *, controls: bool = False, trees: bool = False
) -> tuple[bytes, Acceptance]:
    """Return the body with its ``thor_spec`` in ``vllm_xargs``, and the rule. Raises: ConfigError, naming the field.

    A body that is not a JSON object passes as it is: vLLM's own answer to it is better than ours.
    """
    try:
        request = json.loads(body)
    except ValueError:
        return body, default
    if not isinstance(request, dict) or NAME not in request:
        return body, default
    given = request.pop(NAME)
    if not isinstance(given, dict):
        raise ConfigError(f'{NAME} must be an object such as {{"accept": "exact"}}, not {type(given).__name__}.')
    control = given.pop("control", None) if controls else None
    if control is not None and control not in CONTROLS:
        raise ConfigError(f"control={control!r} is not one of {', '.join(CONTROLS)}.")
    tree = given.pop("tree", "on")
    if tree not in TREES:
        raise ConfigError(f"tree={tree!r} is not one of {', '.join(TREES)}.")
    rule = default.of_request(given)
    if trees and not rule.is_exact:
        raise ConfigError(f"accept={rule.rule!r} is not for draft trees, which this server drafts: exact only.")
    extra = request.get("vllm_xargs") or {}
    if not isinstance(extra, dict):
        raise ConfigError(f"vllm_xargs must be an object, not {type(extra).__name__}.")
    names = {name: key for key, name in REQUEST_KEYS.items()}
    planted = {**({CONTROL_KEY: control} if control else {}), **({TREE_KEY: tree} if tree != "on" else {})}
    request["vllm_xargs"] = {**extra, **{names[name]: value for name, value in given.items()}, **planted}
    return json.dumps(request).encode(), rule


class _Collector:
    """What the engines count, as Prometheus counters beside vLLM's."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        help_of = {
            "drafted": "Drafted tokens that were judged, in steps with a relaxed request.",
            "accepted": "Drafted tokens that were taken, in steps with a relaxed request.",
            "relaxed": "Drafted tokens that were taken because a threshold allowed it.",
            "rejected": "Requests that drew another token than the draft, by its place.",
        }
        found = list(counters.read())
        for i, name in enumerate(COUNTED):
            family = CounterMetricFamily(f"thor_spec:{name}_tokens", help_of[name], labels=("rule", "position"))
            for number, rule in enumerate(RULES):
                for place in range(found[0].shape[2] if found else 0):
                    family.add_metric((rule, str(place)), float(sum(counts[number, i, place] for counts in found)))
            yield family
        trees = list(counters.read_trees())
        family = CounterMetricFamily(
            "thor_spec:trees",
            "Draft trees that were verified, by the number of their nodes, their depth, and their accepted drafts.",
            labels=("of", "number"),
        )
        for i, name in enumerate(counters.OF_TREES):
            for number in range(trees[0].shape[1] if trees else 0):
                family.add_metric((name, str(number)), float(sum(counts[i, number] for counts in trees)))
        yield family


@functools.cache  # the registry refuses a second one
def _register_collector() -> None:
    from prometheus_client import REGISTRY

    REGISTRY.register(_Collector())


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
