"""Sessions of an agent, through the clients that agents use: each turn a streamed tool call, its result sent back."""

import json
from typing import Any

import anthropic
import openai

MODEL = "tiny-hybrid"
ROOMS = ("hall", "attic")
PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "room": {"type": "string", "enum": list(ROOMS)}},
    "required": ["on", "room"],
    "additionalProperties": False,
}
NAME = "set_light"
SYSTEM = "You look after the lights of a house. " * 8
TOKENS = 192  # a byte-level tokenizer needs one for nearly each letter, and the grammar allows for white space


def check(name: str, arguments: str | dict[str, Any]) -> None:
    """Raise AssertionError for a malformed call."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == NAME
    assert set(found) == {"on", "room"}
    assert isinstance(found["on"], bool)
    assert found["room"] in ROOMS


def chat(url: str, seed: int, turns: int) -> int:
    """Drive ``/v1/chat/completions``; return the well-formed calls."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tool = {"type": "function", "function": {"name": NAME, "strict": True, "parameters": PARAMETERS}}
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Light {seed}.{turn}, please."})
        chunks = client.chat.completions.create(
            model=MODEL, messages=messages, tools=[tool], stream=True, max_tokens=TOKENS, temperature=0.7, seed=seed,
            tool_choice={"type": "function", "function": {"name": NAME}},
        )  # type: ignore[call-overload] # fmt: skip
        identity = name = arguments = ""
        for chunk in chunks:
            for call in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
                identity = call.id or identity
                name = call.function.name or name
                arguments += call.function.arguments or ""
        check(name, arguments)
        function = {"name": name, "arguments": arguments}
        messages.append(
            {"role": "assistant", "tool_calls": [{"id": identity, "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": identity, "content": f"done {turn}"})
    return turns


def responses(url: str, seed: int, turns: int) -> int:
    """Drive ``/v1/responses``."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tool: Any = {"type": "function", "name": NAME, "strict": True, "parameters": PARAMETERS}
    given: list[Any] = []
    for turn in range(turns):
        given.append({"role": "user", "content": f"Light {seed}.{turn}, please."})
        events = client.responses.create(
            model=MODEL, instructions=SYSTEM, input=given, tools=[tool], stream=True, max_output_tokens=TOKENS,
            tool_choice={"type": "function", "name": NAME}, temperature=0.7, store=False,
        )  # fmt: skip
        done = [event.response for event in events if event.type == "response.completed"]
        (call,) = [item for item in done[0].output if item.type == "function_call"]
        check(call.name, call.arguments)
        given.append({"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments})
        given.append({"type": "function_call_output", "call_id": call.call_id, "output": f"done {turn}"})
    return turns


def messages(url: str, seed: int, turns: int) -> int:
    """Drive ``/v1/messages``."""
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tool: Any = {"name": NAME, "description": "Switches a light.", "strict": True, "input_schema": PARAMETERS}
    said: list[Any] = []
    for turn in range(turns):
        said.append({"role": "user", "content": f"Light {seed}.{turn}, please."})
        if turn:
            last = said.pop()
            said[-1]["content"].append({"type": "text", "text": last["content"]})
        with client.messages.stream(
            model=MODEL, system=SYSTEM, messages=said, tools=[tool], max_tokens=TOKENS,
            tool_choice={"type": "tool", "name": NAME}, extra_body={"temperature": 0.7},
        ) as stream:  # fmt: skip
            answer = stream.get_final_message()
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        check(call.name, call.input)
        said.append({"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"done {turn}"}
        said.append({"role": "user", "content": [result]})
    return turns


DRIVERS = {"chat": chat, "responses": responses, "messages": messages}
