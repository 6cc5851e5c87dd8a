"""From a line of an engine's log to what helps."""

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class LogLine(NamedTuple):
    """A line that is known. ``fatal``: an engine that writes it is about to end."""

    name: str
    pattern: re.Pattern[str]
    fatal: bool
    remedy: str
    sources: tuple[str, ...]


@functools.cache
def table() -> tuple[LogLine, ...]:
    """Return the known lines; the first that matches counts."""
    content = json.loads(Path(__file__).with_name("log_lines.json").read_text(encoding="utf-8"))
    return tuple(
        LogLine(line["name"], re.compile(line["pattern"]), line["fatal"], line["remedy"], tuple(line["sources"]))
        for line in content["lines"]
    )


def find(line: str) -> LogLine | None:
    """Return what is known about one line."""
    return next((known for known in table() if known.pattern.search(line)), None)


def find_all(lines: Iterable[str]) -> dict[LogLine, str]:
    """Return every known line with the first text that matched it, in the log's order."""
    found: dict[LogLine, str] = {}
    for line in lines:
        if (known := find(line)) is not None:
            found.setdefault(known, line.strip())
    return found
