"""The requests that an engine must answer rightly before anybody is told that it is ready.

``/health`` answers 200 over an engine that is hung or garbles its output; only answers prove answers.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from thor_spec.errors import CanaryError
from thor_spec.serve import metrics

PROMPT = "def mean(values):\n    return"
TOKENS = 16
TOOL_CONTEXT = 1024  # a tool's description takes some hundred tokens of prompt
TIMEOUT_S = 120.0
DRAFTS = "vllm:spec_decode_num_drafts_total"
_ZONES = ("UTC", "local")  # short: a byte-level tokenizer needs a step for nearly each letter of a call
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "time",
        "description": "The time now.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string", "enum": list(_ZONES)}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the canary saw."""

    checks: tuple[str, ...]
    kv: metrics.KVCapacity | None
    drafts: int


def run(url: str, model: str, *, speculating: bool, tools: bool) -> Outcome:
    """Send the canary set; the tool call only if ``tools``.

    Raises: CanaryError, naming the request and what came back.
    """
    checks = ["plain", "stream", "repeat"]
    with (
        httpx.Client(base_url=url, timeout=TIMEOUT_S, verify=False) as client,  # plain HTTP: no certificates to load
        ThreadPoolExecutor(1) as beside,
    ):
        before = metrics.totals(_get(client, "/metrics"))
        call = beside.submit(_call_tool, client, model) if tools else None
        plain, streamed = _complete(client, model), _stream(client, model)
        if call is not None:
            call.result()
            checks.append("tool call")
            if plain != streamed:  # a neighbour in the batch may tip a near tie; alone, nothing may
                plain, streamed = _complete(client, model), _stream(client, model)
        if plain != streamed:
            raise CanaryError(
                f"One prompt, asked twice at temperature 0, gave different tokens ({plain} and {streamed}): the engine "
                "is not deterministic or its state is corrupt. Try --draft none; if that passes, report the drafter."
            )
        text = _get(client, "/metrics")
    drafts = int(metrics.totals(text).get(DRAFTS, 0) - before.get(DRAFTS, 0))
    if speculating:
        if drafts <= 0:
            raise CanaryError(
                f"The engine answers, but drafted nothing ({DRAFTS} did not move): speculation is configured and not "
                "at work. See the log for a drafter that was dropped."
            )
        checks.append("speculation")
    return Outcome(checks=tuple(checks), kv=metrics.kv_capacity(text), drafts=drafts)


def probe(url: str, model: str, *, tokens: int, timeout_s: float) -> list[int]:
    """Ask a serving engine for some tokens of plain text and return them. Raises: CanaryError."""
    body = {**_completion(model), "max_tokens": tokens}
    with httpx.Client(base_url=url, timeout=timeout_s, verify=False) as client:
        answer = _sent(client, "POST", "/v1/completions", body)
    try:
        return list(answer.json()["choices"][0]["token_ids"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CanaryError(f"The request was answered with {answer.text[:200]}. See the engine's log.") from error


def repeats(tokens: list[int]) -> bool:
    """Return whether the second half of ``tokens`` is one short piece over and over."""
    half = tokens[len(tokens) // 2 :]
    return any(half[:-size] == half[size:] for size in range(1, len(half) // 2))


def _get(client: httpx.Client, path: str) -> str:
    return _sent(client, "GET", path, None).text


def _sent(client: httpx.Client, method: str, path: str, body: Any) -> httpx.Response:
    try:
        response = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise CanaryError(f"{method} {path} failed: {error or type(error).__name__}. See the engine's log.") from error
    if response.status_code != httpx.codes.OK:
        raise CanaryError(f"{method} {path} answered {response.status_code}: {response.text[:200]}")
    return response


def _completion(model: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _complete(client: httpx.Client, model: str) -> list[int]:
    choice = _sent(client, "POST", "/v1/completions", _completion(model)).json()["choices"][0]
    return _require_tokens("plain request", choice["token_ids"])


def _stream(client: httpx.Client, model: str) -> list[int]:
    tokens: list[int] = []
    done = False
    try:
        with client.stream("POST", "/v1/completions", json={**_completion(model), "stream": True}) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        tokens += choice.get("token_ids") or []
    except httpx.HTTPError as error:
        raise CanaryError(f"The streaming request failed: {error or type(error).__name__}. See the log.") from error
    if not done:
        raise CanaryError("The streaming request ended without [DONE]. See the engine's log.")
    return _require_tokens("streaming request", tokens)


def _require_tokens(what: str, tokens: Any) -> list[int]:
    if not isinstance(tokens, list) or len(tokens) != TOKENS:
        raise CanaryError(f"The {what} asked for {TOKENS} tokens and got {tokens}. See the engine's log.")
    return tokens


def _call_tool(client: httpx.Client, model: str) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "What time is it, UTC?"}],
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": _TOOL["function"]["name"]}},
        "max_tokens": 128,  # a byte-level tokenizer needs most of them
        "temperature": 0,
    }
    message = _sent(client, "POST", "/v1/chat/completions", body).json()["choices"][0]["message"]
    try:
        arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
        valid = arguments["zone"] in _ZONES
    except (KeyError, IndexError, TypeError, ValueError):
        valid = False
    if not valid:
        raise CanaryError(
            f"The tool call came back malformed: {json.dumps(message)[:300]}. Check --tool-call-parser for this model."
        )
