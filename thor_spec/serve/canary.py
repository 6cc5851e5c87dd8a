"""The requests that an engine must answer rightly before anybody is told that it is ready.

``/health`` answers 200 over an engine that is hung or garbles its output; only answers prove answers.
"""

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from thor_spec.errors import CanaryError, FailedRequestError
from thor_spec.serve import metrics
from thor_spec.serve.client import why
from thor_spec.serve.golden import Golden

PROMPT = "def mean(values):\n    return"
TOKENS = 16
TOOL_CONTEXT = 1024  # a tool's description takes some hundred tokens of prompt
TIMEOUT_S = 120.0
LONG_TOKENS = 4096
DRAFTS = "vllm:spec_decode_num_drafts_total"
HITS = "vllm:prefix_cache_hits_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PROMPTS = (
    PROMPT,
    "The first thing to check when a machine does not start is",
    "1, 1, 2, 3, 5, 8,",
    '{"name": "Thor", "memory_gib":',
    "Q: What is the capital of Norway?\nA:",
    "# Shopping list\n\n- bread\n-",
    "SELECT count(*) FROM",
    "Il pleut sur",
)
_ZONES = ("UTC", "local")  # short: a byte-level tokenizer needs a step for nearly each letter of a call
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time now.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"tz": {"type": "string", "enum": list(_ZONES)}},
            "required": ["tz"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Which requests to send."""

    speculating: bool
    tools: bool
    full: bool = False
    """Also eight prompts at once, and a long one asked twice."""
    context: int = 0
    acceptance_floor: float | None = None
    """Least tokens per verify step, averaged over the set; None asks for any draft at all."""
    api_key: str | None = None
    golden: Golden = ()
    """Greedy answers must begin with these texts."""
    caching: bool = False
    """Whether a hybrid's prefixes are cached: an answer from the cache must then have the bits of one without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the canary saw."""

    checks: tuple[str, ...]
    kv: metrics.KVCapacity | None
    drafts: int


def run(url: str, model: str, asked: Canary) -> Outcome:
    """Send the canary set.

    Raises: CanaryError, naming the request and what came back; FailedRequestError, where nothing did.
    """
    checks = ["plain", "stream", "repeat"]
    with _client(url, TIMEOUT_S, asked.api_key) as client:
        _ask_twice(client, model, tools=asked.tools)
        checks += ["tool call"] * asked.tools
        if asked.full:
            _ask_many(client, model)
            _ask_long(client, model, asked.context)
            checks += ["batch", "long prompt"]
        if asked.caching and _ask_cached(client, model, asked.context):
            checks.append("prefix cache")
        if asked.golden:
            _require_golden(client, model, asked.golden)
            checks.append("golden answers")
        text = _get(client, "/metrics")
    counted = metrics.totals(text)  # from zero on: nobody else has asked this engine anything
    drafts, accepted = (int(counted.get(name, 0)) for name in (DRAFTS, ACCEPTED))
    if asked.speculating:
        _require_speculation(drafts, accepted, asked.acceptance_floor)
        checks.append("speculation")
    return Outcome(checks=tuple(checks), kv=metrics.kv_capacity(text), drafts=drafts)


def unasked(url: str) -> Outcome:
    """Return what an engine says of itself that nobody asks anything. Raises: CanaryError."""
    with httpx.Client(base_url=url, timeout=TIMEOUT_S, verify=False) as client:
        return Outcome(checks=(), kv=metrics.kv_capacity(_get(client, "/metrics")), drafts=0)


def _ask_twice(client: httpx.Client, model: str, *, tools: bool) -> None:
    """Ask one prompt twice, once streamed, with the tool call beside it."""
    with ThreadPoolExecutor(1) as beside:
        call = beside.submit(_call_tool, client, model) if tools else None
        plain, streamed = _complete(client, model), _stream(client, model)
        if call is not None:
            call.result()
            if plain != streamed:  # a neighbour in the batch may tip a near tie; alone, nothing may
                plain, streamed = _complete(client, model), _stream(client, model)
    _require_same("One prompt, asked twice at temperature 0,", plain, streamed)


def _ask_many(client: httpx.Client, model: str) -> None:
    """Ask all prompts at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        list(clients.map(lambda prompt: _complete(client, model, prompt), PROMPTS))


def _ask_long(client: httpx.Client, model: str, context: int) -> None:
    """Ask a prompt of many tokens twice: where prefixes are cached, the second answer comes from the cache."""
    ids = _first_choice(client, {**_completion(model), "max_tokens": 1})["prompt_token_ids"]
    length = min(LONG_TOKENS, context - TOKENS)
    prompt = (ids * (length // len(ids) + 1))[:length]
    first, again = _complete(client, model, prompt), _complete(client, model, prompt)
    _require_same(f"A prompt of {length} tokens, asked twice at temperature 0,", first, again)


def _ask_cached(client: httpx.Client, model: str, context: int) -> bool:
    """Compare an answer from the cache with the same one without, bit by bit; False where no block fits."""
    block = int(metrics.cache_config(_get(client, "/metrics")).get("block_size", 0))
    length = block + block // 2
    if not block or length + TOKENS > context:
        return False
    ids = _first_choice(client, {**_completion(model), "max_tokens": 1})["prompt_token_ids"]
    prompt = (ids * (length // len(ids) + 1))[:length]
    body = {**_completion(model, prompt), "logprobs": 1}
    hits = metrics.totals(_get(client, "/metrics")).get(HITS, 0)
    salts = uuid.uuid4().hex, uuid.uuid4().hex
    asked = [_first_choice(client, {**body, "cache_salt": salts[i]}) for i in (0, 1, 1)]
    found = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in asked]
    if found[2] != found[0]:
        raise CanaryError(
            f"A prompt of {length} tokens got another answer from the prefix cache than without it: cached states are "
            "not those of their prompt. Serve with -- --no-enable-prefix-caching, and run `thor-spec verify "
            "prefix-cache`."
        )
    if metrics.totals(_get(client, "/metrics")).get(HITS, 0) <= hits:
        raise CanaryError(
            f"A prompt of {length} tokens, asked twice, found nothing in the prefix cache: the cache does nothing. "
            "Serve with -- --no-enable-prefix-caching, or run `thor-spec verify prefix-cache` for where it misses."
        )
    return True


def _require_same(what: str, first: list[int], again: list[int]) -> None:
    if first != again:
        raise CanaryError(
            f"{what} gave different tokens ({first} and {again}): the engine is not deterministic or its state is "
            "corrupt. Try --draft none; if that passes, report the drafter."
        )


def _require_speculation(drafts: int, accepted: int, floor: float | None) -> None:
    if drafts <= 0:
        raise CanaryError(
            f"The engine answers, but drafted nothing ({DRAFTS} did not move): speculation is configured and not "
            "at work. See the log for a drafter that was dropped."
        )
    length = 1 + accepted / drafts
    if floor is not None and length < floor:
        raise CanaryError(
            f"{length:.2f} tokens come out of a verify step, below the floor of {floor:g}: the drafter does not fit "
            "this target, or reads wrong features. Check --draft, or lower acceptance_floor."
        )


def _require_golden(client: httpx.Client, model: str, golden: Golden) -> None:
    for prompt, text in golden:
        body = {**_completion(model, prompt), "max_tokens": len(text.encode())}  # a token has a byte at least
        answer = _first_choice(client, body)["text"]
        if not answer.startswith(text):
            raise CanaryError(
                f"The golden answer to {prompt[:60]!r} is {text[:60]!r}, and the engine says {answer[:60]!r}: weights, "
                "kernels or templates are not what they were. Make the answers anew only if that was meant."
            )


def probe(url: str, model: str, *, tokens: int, timeout_s: float, api_key: str | None = None) -> list[int]:
    """Ask a serving engine for some tokens of plain text and return them. Raises: CanaryError."""
    body = {**_completion(model), "max_tokens": tokens}
    with _client(url, timeout_s, api_key) as client:
        return list(_first_choice(client, body)["token_ids"])


def _client(url: str, timeout_s: float, api_key: str | None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url, timeout=timeout_s, headers=headers, verify=False)  # plain HTTP: no certificates


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
        raise FailedRequestError(f"{method} {path} failed: {why(error)}. See the engine's log.") from error
    if response.status_code != httpx.codes.OK:
        raise FailedRequestError(f"{method} {path} answered {response.status_code}: {response.text[:200]}")
    return response


def _first_choice(client: httpx.Client, body: Any, path: str = "/v1/completions") -> dict[str, Any]:
    answer = _sent(client, "POST", path, body)
    try:
        found: dict[str, Any] = answer.json()["choices"][0]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CanaryError(f"POST {path} was answered with {answer.text[:200]}. See the engine's log.") from error
    return found


def _completion(model: str, prompt: str | list[int] = PROMPT) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _complete(client: httpx.Client, model: str, prompt: str | list[int] = PROMPT) -> list[int]:
    return _require_tokens("plain request", _first_choice(client, _completion(model, prompt))["token_ids"])


def _stream(client: httpx.Client, model: str) -> list[int]:
    tokens: list[int] = []
    done = False
    try:
        with client.stream("POST", "/v1/completions", json={**_completion(model), "stream": True}) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "choices" not in event:  # vLLM tells of a failure in the stream, under status 200
                        said = line[6:206]
                        raise FailedRequestError(f"The streaming request broke off: {said}. See the engine's log.")
                    for choice in event["choices"]:
                        tokens += choice.get("token_ids") or []
    except httpx.HTTPError as error:
        raise FailedRequestError(f"The streaming request failed: {why(error)}. See the engine's log.") from error
    if not done:
        raise FailedRequestError("The streaming request ended without [DONE]. See the engine's log.")
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
    message = _first_choice(client, body, "/v1/chat/completions")["message"]
    try:
        arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
        valid = arguments["tz"] in _ZONES
    except (KeyError, IndexError, TypeError, ValueError):
        valid = False
    if not valid:
        raise CanaryError(
            f"The tool call came back malformed: {json.dumps(message)[:300]}. Check --tool-call-parser for this model."
        )
