"""Why an engine died, in one line of its log: the first that is odd, since the last traceback is an echo of it."""

import re
from collections.abc import Iterable
from pathlib import Path

from thor_spec.known import log_lines
from thor_spec.serve import log

# What is before a line: vLLM's "(EngineCore pid=7) ERROR 11-29 20:00:39 [core.py:133] ", and torch's "[rank0]: ", if an
# engine dies in the process that started it.
_PREFIX = re.compile(
    r"^(\([\w ]+pid=\d+\)\s*)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]+\]\s?)?(\[rank\d+\]: ?)?"
)
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Killed)\b(: .*)?$")
_NATIVE = re.compile(
    r"NV_ERR_NO_MEMORY|CUDA error|no kernel image|ptxas fatal|Segmentation fault|Fatal Python error|"
    r"terminate called|Bus error|illegal memory access|only supports sm|unrecognized arguments|error: argument"
)
_DYING = re.compile(r"EngineCore encountered a fatal error|Engine core proc .* died unexpectedly")
_LOGGED = re.compile(r"\b(ERROR|CRITICAL)\b")
_HEADERS = re.compile(
    r"Traceback \(most recent call last\)|EngineCore failed to start|EngineCore encountered a fatal error|"
    r"WorkerProc failed to start|WorkerProc hit an exception|^\s*(File \"|\^|raise )"
)


def first_odd_line(lines: Iterable[str]) -> str | None:
    """Return the first line that names a cause: a native error, an exception's message, or else a logged error.

    Headers that only announce a cause ("EngineCore failed to start.") are passed over.
    """
    logged = None
    for line in lines:
        text = _PREFIX.sub("", line.rstrip())
        if _NATIVE.search(text) or _EXCEPTION.match(text.strip()) or _is_fatal(text):
            return text.strip()
        if logged is None and _LOGGED.search(line) and text.strip() and not _HEADERS.search(text):
            logged = text.strip()
    return logged


def tells_of_death(lines: Iterable[str]) -> bool:
    """Return whether a log says that its engine, or a worker of it, is about to end."""
    return any(_DYING.search(line) or _is_fatal(line) for line in lines)


def cause(lines: Iterable[str], log_file: Path) -> str:
    """Return the first odd line of an engine's log, or why there is none."""
    if odd := first_odd_line(lines):
        return odd
    return "no space left on device for its log" if log.is_full(log_file) else "its log shows no error"


def told(odd: str, log_file: Path) -> str:
    """Return a cause as a message ends with it: the log to read behind it, and what helps."""
    return f"{odd}\nSee {log_file}.{remedy(odd)}"


def remedy(odd: str | None) -> str:
    """Return what helps against an odd line, with a space before it; empty where nothing is known."""
    known = log_lines.find(odd) if odd else None
    return f" {known.remedy}" if known else ""


def _is_fatal(text: str) -> bool:
    known = log_lines.find(text)
    return known is not None and known.fatal
