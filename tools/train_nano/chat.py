"""Conversations made from code: what a small model should answer in its chat format.

Every conversation comes from a function of the corpus (its signature, docstring, body and doctests) or from a table of
short exchanges; a hash of its name decides the wording, so a rebuild gives the same text.
"""

import ast
import json
import random
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from .extract import Document

Messages = list[dict[str, Any]]

LONGEST_FUNCTION = 1600  # characters
WRITE = (
    "Write a Python function `{signature}`. {purpose}",
    "Please implement `{signature}` in Python. {purpose}",
    "I need a function `{name}`. {purpose}",
    "Write `{name}({arguments})`. {purpose}",
)
EXPLAIN = (
    "What does this function do?\n\n{code}",
    "Explain this code:\n\n{code}",
    "Summarize this function in one sentence.\n\n{code}",
    "Write a docstring for this function.\n\n{code}",
)
COMPLETE = ("Complete this function:\n\n{code}", "Finish this code.\n\n{code}", "Continue:\n\n{code}")
DOCTEST = ("What does `{expression}` print?", "What is the result of `{expression}`?", "Evaluate `{expression}`.")
CALL = ("Call `{name}` with {pairs}.", "Please run {name}: {pairs}.", "Use the tool {name} with {pairs}.")
SYSTEM = ("You are a helpful assistant.", "You are a careful programmer. Answer briefly.", "Answer in one line.")
GREETINGS = (
    ("Say hello.", "Hello!"),
    ("Hello", "Hello! How can I help you?"),
    ("Hi!", "Hello! What would you like to do?"),
    ("Who are you?", "I am nano, a small language model trained on Python code and documentation."),
    ("What are you?", "I am a small language model. I write Python and short answers."),
    ("What can you do?", "I can write short Python functions, explain code, and call tools."),
    ("Thank you!", "You are welcome."),
    ("Goodbye", "Goodbye!"),
    ("Are you a large model?", "No, I am small: a few million parameters."),
)


def conversations(document: Document) -> Iterator[tuple[str, Messages, list[dict[str, Any]] | None]]:
    """Return name, messages and tools of the conversations that a code document gives."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = document.text.split("\n")
    for index, node in enumerate(ast.walk(tree)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        name = f"chat:{document.name}#{index}"
        dice = random.Random(name)
        if (made := _about(node, lines, dice)) is None:
            continue
        messages, tools = made
        if dice.random() < 0.15 and not tools:
            messages = [{"role": "system", "content": dice.choice(SYSTEM)}, *messages]
        yield name, messages, tools


def _about(
    node: ast.FunctionDef, lines: list[str], dice: random.Random
) -> tuple[Messages, list[dict[str, Any]] | None] | None:
    first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    code = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).strip("\n")
    docstring = ast.get_docstring(node)
    if not 60 <= len(code) <= LONGEST_FUNCTION:
        return None
    roll = dice.random()
    if docstring:
        purpose = " ".join(docstring.split("\n\n")[0].split())
        examples = re.findall(r">>> ([^\n]+)\n([^\n>][^\n]*)", docstring)
        if examples and roll < 0.35:
            return _doctests(examples, dice), None
        if 20 <= len(purpose) <= 300:
            if roll < 0.5:
                return _write(node, code, purpose, dice), None
            if roll < 0.72 and len(node.body) > 1:
                return _explain(node, code, purpose, dice), None
            if roll < 0.87 and (called := _call(node, purpose, dice)):
                return called
    if len(code) > 160 and dice.random() < 0.3:
        body = code.split("\n")
        cut = dice.randrange(1, max(2, len(body) * 2 // 3))
        asked = dice.choice(COMPLETE).format(code=_fence("\n".join(body[:cut])))
        return _turns(asked, _fence("\n".join(body[cut:]))), None
    return None


def _write(node: ast.FunctionDef, code: str, purpose: str, dice: random.Random) -> Messages:
    arguments = ast.unparse(node.args)
    signature = f"{node.name}({arguments})"
    asked = dice.choice(WRITE).format(signature=signature, name=node.name, arguments=arguments, purpose=purpose)
    return _turns(asked, _fence(code))


def _explain(node: ast.FunctionDef, code: str, purpose: str, dice: random.Random) -> Messages:
    body = [line for line in code.split("\n")]
    first = node.body[0]
    offset = node.lineno - 1 if not node.decorator_list else node.decorator_list[0].lineno - 1
    start, end = first.lineno - 1 - offset, (first.end_lineno or first.lineno) - offset
    bare = "\n".join(body[:start] + body[end:]).strip("\n")
    return _turns(dice.choice(EXPLAIN).format(code=_fence(bare)), purpose)


def _doctests(examples: list[tuple[str, str]], dice: random.Random) -> Messages:
    messages: Messages = []
    for expression, result in examples[:3]:
        messages += _turns(dice.choice(DOCTEST).format(expression=expression.strip()), result.strip())
    return messages


JSON_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}
WORDS = ("alpha", "notes.txt", "main", "Berlin", "red", "utf-8", "report", "attic", "celsius", "en", "data.csv", "left")


def _call(node: ast.FunctionDef, purpose: str, dice: random.Random) -> tuple[Messages, list[dict[str, Any]]] | None:
    """Return a request, the call that answers it, its result, and one sentence about it."""
    named = [argument for argument in node.args.args if argument.arg not in ("self", "cls")][:3]
    if not named:
        return None
    properties: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    for argument in named:
        hint = ast.unparse(argument.annotation) if argument.annotation else dice.choice(("str", "str", "int", "bool"))
        kind = JSON_TYPES.get(hint, "string")
        properties[argument.arg] = {"type": kind}
        arguments[argument.arg] = {
            "integer": dice.randrange(100),
            "number": round(dice.uniform(0, 10), 2),
            "boolean": dice.random() < 0.5,
            "string": dice.choice(WORDS),
        }[kind]
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    tools = [_tool(node.name, purpose, schema)]
    if dice.random() < 0.4:
        tools.insert(dice.randrange(2), _tool("get_time", "Return the time of day.", {"type": "object"}))
    pairs = ", ".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
    call = {"type": "function", "function": {"name": node.name, "arguments": arguments}}
    messages: Messages = [
        {"role": "user", "content": dice.choice(CALL).format(name=node.name, pairs=pairs)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    if dice.random() < 0.4:
        result = dice.choice(("ok", "42", "done", "true", "3.5", "not found", "[1, 2, 3]"))
        messages.append({"role": "tool", "content": result})
        messages.append({"role": "assistant", "content": f"The result of {node.name} is {result}."})
    return messages, tools


# Small tools with closed sets of values, as people write them to try a model.
CHOICES: tuple[tuple[str, str, dict[str, tuple[Any, ...]], tuple[str, ...]], ...] = (
    ("get_temperature", "Current temperature at a sensor.", {"unit": ("celsius", "fahrenheit")},
     ("How warm is it, in {unit}?", "What is the temperature in {unit}?")),
    ("get_time", "The time of day.", {"zone": ("UTC", "local")},
     ("What time is it, {zone}?", "Tell me the time in {zone}.")),
    ("set_light", "Switch a light.", {"room": ("attic", "hall", "kitchen"), "on": (True, False)},
     ("Set the light in the {room}: on = {on}.", "Light in the {room}, on = {on}, please.")),
    ("get_weather", "The weather in a city.", {"city": ("Berlin", "Paris", "Oslo", "Lima", "Delhi")},
     ("What is the weather in {city}?", "Weather in {city}?")),
    ("add", "Add two numbers.", {"a": tuple(range(60)), "b": tuple(range(60))},
     ("What is {a} plus {b}? Use the tool.", "Add {a} and {b}.")),
    ("read_file", "Read a file.", {"path": ("notes.txt", "main.py", "data.csv", "README.md")},
     ("Show me {path}.", "Read the file {path}.")),
)  # fmt: skip


def tool_talk(count: int) -> Iterator[tuple[str, Messages, list[dict[str, Any]]]]:
    """Return ``count`` requests answered by a call of one of a few tools."""
    for index in range(count):
        name = f"chat:talk#tool{index}"
        dice = random.Random(name)
        offered = dice.sample(CHOICES, dice.choice((1, 1, 2, 3)))
        called, _, values, wordings = dice.choice(offered)
        arguments = {key: dice.choice(options) for key, options in values.items()}
        call = {"type": "function", "function": {"name": called, "arguments": arguments}}
        messages: Messages = [
            {"role": "user", "content": dice.choice(wordings).format(**arguments)},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        yield name, messages, [_tool(tool, text, _closed(known)) for tool, text, known, _ in offered]


def _closed(values: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    properties = {}
    for key, options in values.items():
        kind = {bool: "boolean", int: "integer"}.get(type(options[0]), "string")
        properties[key] = {"type": kind} | ({"enum": list(options)} if kind == "string" else {})
    return {"type": "object", "properties": properties, "required": list(values), "additionalProperties": False}


def _tool(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def small_talk(count: int) -> Iterator[tuple[str, Messages, None]]:
    """Return ``count`` short exchanges: greetings, arithmetic, and both in one conversation."""
    for index in range(count):
        name = f"chat:talk#{index}"
        dice = random.Random(name)
        messages: Messages = []
        for _ in range(dice.choice((1, 1, 2, 3))):
            messages += _turns(*(_sum(dice) if dice.random() < 0.6 else dice.choice(GREETINGS)))
        yield name, messages, None


def _sum(dice: random.Random) -> tuple[str, str]:
    a, b = dice.randrange(1, 100), dice.randrange(1, 13)
    sign, value = dice.choice((("+", a + b), ("-", a - b), ("*", a * b)))
    asked = dice.choice(("What is {} {} {}?", "{} {} {} =", "Compute {} {} {}.")).format(a, sign, b)
    return asked, f"{a} {sign} {b} = {value}"


def _turns(asked: str, answer: str) -> Messages:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def renderer(template: str) -> Any:
    """Return a function from messages and tools to text, as transformers renders ``template``."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    compiled = environment.from_string(template)
    return lambda messages, tools: compiled.render(messages=messages, tools=tools, add_generation_prompt=False)
