"""JSON that people hand over. Whatever is wrong with it is a ValueError, as callers expect."""

import json
from typing import Any


def loads(text: str | bytes) -> Any:
    """Return the value. Raises: ValueError, also where it nests too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def lines(text: str) -> list[str]:
    """Return the lines of JSON lines: what other line breaks there are may stand in a text as they are."""
    return text.removesuffix("\n").split("\n") if text else []


def whole(value: Any) -> Any:
    """Return ``value``. Raises: ValueError, if one of its texts holds half a character, which can be sent nowhere."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a character, \\u{ord(error.object[error.start]):x}, stands in a text") from error
    return value
