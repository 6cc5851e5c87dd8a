"""Requests that are written down, hidden or not, and folded into sessions."""

import json
from pathlib import Path
from typing import Any

import pytest

from thor_spec.bench import traces
from thor_spec.vllm_plugin.recorder import Recorder, hidden

USER = {"role": "user", "content": "Where is the key?"}
CALL = {"name": "search", "arguments": '{"for": "key"}'}
ASKED = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": CALL}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "Under the mat."}


def recorded(folder: Path, *bodies: Any, contents: bool) -> Path:
    file = folder / "r.jsonl"
    recorder = Recorder(file, contents=contents)
    for body in bodies:
        recorder.add(body if isinstance(body, bytes) else json.dumps(body).encode())
    return file


def test_a_session_is_folded_from_its_requests(tmp_path: Path) -> None:
    other = {"messages": [{"role": "user", "content": "Something else"}]}
    bodies = (
        {"messages": [USER], "model": "m"},
        other,
        {"messages": [USER, ASKED, RESULT]},
        b"{",
        [1],
        {"messages": 3},
        b'{"messages":' + b"[" * 100_000,
        b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}",  # can be read, and not hidden
    )
    file = recorded(tmp_path, *bodies, contents=False)
    file.unlink()
    file = recorded(tmp_path, *bodies[:-1], contents=True)
    assert len(file.read_text().splitlines()) == 3
    assert file.stat().st_mode & 0o777 == 0o600
    first, second = traces.read(file)
    assert list(traces.requests(first)) == [[USER], [USER, ASKED, RESULT]]
    assert list(traces.requests(second)) == [other["messages"]]


def test_hidden_texts_are_as_long_and_the_same_where_they_were(tmp_path: Path) -> None:
    file = recorded(tmp_path, {"messages": [USER]}, {"messages": [USER, ASKED, RESULT]}, contents=False)
    text = file.read_text()
    for word in ("key", "search", "mat"):
        assert word not in text
    (session,) = traces.read(file)
    assert [message["role"] for message in session] == ["user", "assistant", "tool", "assistant"]
    assert len(session[0]["content"]) == len(USER["content"])
    assert session[1]["tool_calls"][0]["id"] == session[2]["tool_call_id"] == "c1"
    assert json.loads(session[1]["tool_calls"][0]["function"]["arguments"])
    assert hidden(USER) == session[0]
    assert hidden({**USER, "content": "Where is the cat?"}) != session[0]


def test_what_cannot_be_written_down_is_no_matter_of_the_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut = b'{"messages": [{"role": "user", "content": "a cut \\ud83d"}]}'  # half an emoji, as JSON allows
    for contents in (False, True):
        assert recorded(tmp_path, cut, contents=contents).read_text()
    recorder = Recorder(Path("/dev/full"), contents=True)
    for _ in range(3):
        recorder.add(json.dumps({"messages": [USER]}).encode())
    assert [record.getMessage() for record in caplog.records] == [
        "No more requests are recorded: /dev/full: No space left on device."
    ]
