"""Writes down the chat requests that a server answers, so that ``bench agent`` can replay them.

A line of JSON for each request to ``/v1/chat/completions`` that was not refused: its messages, without the tools that
it offers. Unless contents are kept, every text is replaced by letters drawn from its hash: as long, and the same
wherever it was the same, so that conversations still begin alike where they did.
"""

import functools
import hashlib
import json
import os
import random
import string
from pathlib import Path
from typing import Any

from thor_spec.vllm_plugin import compat

PATH = "/v1/chat/completions"
_KEPT = frozenset({"role", "type", "id", "tool_call_id"})  # what says how a conversation is built


class Recorder:
    """One file, appended to; only its owner may read it."""

    def __init__(self, file: Path, *, contents: bool) -> None:
        self._file = file
        self._contents = contents
        self._failed = False

    def add(self, body: bytes) -> None:
        """Write down one request; what is no request is left out. A disk that is full ends the recording, told once."""
        if self._failed:
            return
        try:
            messages = json.loads(body)["messages"]
            if not isinstance(messages, list):
                return
            line = json.dumps({"messages": messages if self._contents else hidden(messages)}) + "\n"
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        try:
            with open(self._file, "ab", opener=functools.partial(os.open, mode=0o600)) as file:
                file.write(line.encode())
        except OSError as error:
            self._failed = True
            compat.LOG.warning("No more requests are recorded: %s: %s.", self._file, error.strerror)


def hidden(value: Any, key: str = "") -> Any:
    """Return ``value`` with its texts replaced; names of functions too, and JSON within texts."""
    if isinstance(value, dict):
        return {name: hidden(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [hidden(inner, key) for inner in value]
    if not isinstance(value, str) or key in _KEPT:
        return value
    if key == "arguments":  # chat templates read these as JSON
        return json.dumps({"x": _letters(value)})
    return _letters(value)


def _letters(text: str) -> str:
    rng = random.Random(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
    return "".join(rng.choices(string.ascii_lowercase + " ", k=len(text)))
