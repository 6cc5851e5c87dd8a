"""Everyday requests through the OpenAI client, against the default of ``thor-spec serve``."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionToolParam

from tests.e2e.served import Served
from thor_spec.serve.metrics import by_label

MODEL = "tiny-hybrid"
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "set_light",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "room": {"type": "string", "enum": ["hall", "attic"]}},
            "required": ["on", "room"],
            "additionalProperties": False,
        },
    },
}


def complete(client: openai.OpenAI, prompt: str, **options: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, **{"max_tokens": 32, "temperature": 0, **options})


def test_ready_reports_what_is_served(hybrid: Served) -> None:
    ready = hybrid.ready
    assert (ready["model"], ready["drafter"], ready["draft_tokens"]) == (MODEL, "tiny-hybrid-dflash", 7)
    assert ready["checks"] == ["plain", "stream", "repeat", "tool call", "batch", "long prompt", "speculation"]
    assert ready["kv"]["tokens"] > 2048
    assert ready["kv"]["sequences"] > 1


def test_completion_is_greedy_and_repeatable(client: openai.OpenAI) -> None:
    first, second = (complete(client, "The river") for _ in range(2))
    assert first.choices[0].text == second.choices[0].text
    assert first.usage.completion_tokens == 32


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Say hello."}], max_tokens=24, temperature=0
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_streaming_gives_the_same_text(client: openai.OpenAI) -> None:
    whole = complete(client, "A small model").choices[0].text
    chunks = [chunk.choices[0].text for chunk in complete(client, "A small model", stream=True)]
    assert "".join(chunks) == whole
    assert len([chunk for chunk in chunks if chunk]) > 1


def test_tool_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Light in the attic, please."}],
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "set_light"}},
        max_tokens=96,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "set_light"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"on", "room"}
    assert arguments["room"] in ("hall", "attic")


def test_logprobs(client: openai.OpenAI) -> None:
    found = complete(client, "The answer to", logprobs=3).choices[0].logprobs
    assert len(found.tokens) == 32
    for chosen, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert chosen == max(top.values())  # greedy takes the likeliest


def test_stop_string(client: openai.OpenAI) -> None:
    text = complete(client, "The answer to").choices[0].text
    stop = text.strip()[3:6]
    cut = complete(client, "The answer to", stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == text[: text.index(stop)]


def test_seeded_sampling_repeats(client: openai.OpenAI) -> None:
    first, second, other = (
        complete(client, "Once", temperature=1.0, seed=seed, extra_body={"return_token_ids": True}).choices[0].token_ids
        for seed in (7, 7, 8)
    )
    assert first == second
    assert first != other


def test_eight_at_once(client: openai.OpenAI, hybrid: Served) -> None:
    prompts = [f"Number {i} of eight:" for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: complete(client, p, max_tokens=24), prompts))
    assert [answer.usage.completion_tokens for answer in answers] == [24] * 8
    assert hybrid.metric("vllm:spec_decode_num_accepted_tokens_total") > 0


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "no-such-model", "prompt": "x"}, 404),
        ({"model": MODEL, "prompt": "x", "max_tokens": -1}, 400),
        ({"model": MODEL, "prompt": "x", "temperature": "hot"}, 400),
        ({"model": MODEL, "prompt": "x" * 4000}, 400),
        ({"model": MODEL}, 400),
    ],
    ids=["model", "max_tokens", "type", "too long", "no prompt"],
)
def test_an_invalid_request_is_refused_and_the_server_lives_on(
    client: openai.OpenAI, hybrid: Served, body: dict[str, Any], status: int
) -> None:
    answer = httpx.post(f"{hybrid.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert complete(client, "still here", max_tokens=2).usage.completion_tokens == 2


def test_a_client_that_leaves_frees_its_sequences(client: openai.OpenAI, hybrid: Served) -> None:
    def ran_to_their_end() -> float:
        return by_label(hybrid.metrics(), "vllm:request_success_total", "finished_reason").get("length", 0.0)

    before = ran_to_their_end()
    # Eight at once, because a starved client must still leave long before they end by themselves.
    eight: dict[str, Any] = {"n": 8, "temperature": 1, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    stream = complete(client, "A long story", stream=True, **eight)
    next(iter(stream))
    stream.close()
    assert complete(client, "next", max_tokens=2).usage.completion_tokens == 2
    hybrid.wait_metric("vllm:num_requests_running", 0)
    assert ran_to_their_end() == before + 1, "the one after them"
