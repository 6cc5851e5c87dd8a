"""Traces of agents: conversations whose every request is written down, so that all arms are asked the same.

A file is JSON: ``{"schema": 1, "sessions": [[message, …], …]}`` with messages as of ``/v1/chat/completions``. Each
assistant message stands for one request: that of all messages before it. A recording of ``serve --record`` is folded
into that: a request that goes on where another one ended belongs to its session.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from thor_spec import json_text
from thor_spec.bench import workload
from thor_spec.errors import ConfigError

SCHEMA = 1
Session = Sequence[dict[str, Any]]
_TOOLS = ("read_file", "list_folder", "run_tests", "search")


def synthetic(*, sessions: int, turns: int, context: int, tokens: int, seed: int) -> list[Session]:
    """Return tool-using sessions that begin alike and grow to about ``context``, counting a token per character.

    Args:
        turns: requests of each session.
        context: tokens that the last request and its answer may take.
        tokens: of each answer.
    """
    if turns < 2:
        raise ConfigError(f"--turns {turns} must be at least 2: a session without a second turn reuses nothing.")
    room = context - turns * (tokens + 64) - 256  # templates and calls take some
    if room < turns * 64:
        raise ConfigError(f"{turns} turns do not fit into a context of {context}. Lower --turns or --tokens.")
    system = {
        "role": "system",
        "content": f"You work on a repository with tools.\n{_text(random.Random(seed), room // 2)}",
    }
    return [_session(random.Random(f"{seed}/{number}"), system, turns, room // 2) for number in range(sessions)]


def _session(rng: random.Random, system: dict[str, Any], turns: int, room: int) -> Session:
    messages = [system, {"role": "user", "content": f"Task {rng.randrange(10_000)}: {_text(rng, 60)}"}]
    for turn in range(turns):
        arguments = json.dumps({"path": f"src/part{rng.randrange(100)}.py"})
        identity = f"call_{turn}"
        function = {"name": rng.choice(_TOOLS), "arguments": arguments}
        call = {"id": identity, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": identity, "content": _text(rng, room // turns)})
    return messages[:-1]


def _text(rng: random.Random, characters: int) -> str:
    sentences = workload.sentences()
    return workload.document(rng.sample(sentences, len(sentences)), max(characters, 1))[:characters]


def requests(session: Session) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages of each request of a session."""
    for place, message in enumerate(session):
        if message["role"] == "assistant":
            yield list(session[:place])


def folded(recorded: Sequence[Mapping[str, Any]]) -> list[Session]:
    """Return the sessions of which these are the requests, in the order in which they began."""
    found: list[list[dict[str, Any]]] = []
    for request in recorded:
        messages = list(request["messages"])
        grown = next((s for s in reversed(found) if len(s) < len(messages) and messages[: len(s)] == s), None)
        if grown is not None:
            grown[:] = messages
        else:
            found.append(messages)
    return [[*session, {"role": "assistant", "content": ""}] for session in found]


def read(path: Path) -> list[Session]:
    """Read a trace. Raises: ConfigError, naming what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
        content: Any
        if path.suffix == ".jsonl":
            content = {"schema": SCHEMA, "sessions": folded([json_text.loads(line) for line in json_text.lines(text)])}
        else:
            content = json_text.loads(text)
        json_text.whole(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"The trace {path} cannot be read: {error}.") from error
    sessions = content.get("sessions") if isinstance(content, dict) else None
    if not sessions or content.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is no trace of schema {SCHEMA}: it needs a list of sessions.")
    for number, session in enumerate(sessions):
        if not isinstance(session, list) or not all(isinstance(m, dict) and "role" in m for m in session):
            raise ConfigError(f"{path}: session {number} must be a list of messages.")
        if not any(message["role"] == "assistant" for message in session):
            raise ConfigError(f"{path}: session {number} has no assistant message, and so no request.")
    found: list[Session] = sessions
    return found
