"""Who holds a lock: a record inside the lock file, for people and for ``thor-spec stop``.

Advice only. The kernel's lock decides whether a job may start; the record may be stale, torn or garbage.
"""

import json
import os
import shlex
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from thor_spec.guard import processes

SCHEMA = 1
RECORD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The process that holds a lock and what it runs. ``start_ticks`` is field 22 of ``/proc/PID/stat``."""

    schema: int = SCHEMA
    pid: int
    start_ticks: int
    boot_id: str
    uuid: str
    argv: tuple[str, ...] = ()
    title: str = ""
    unit: str | None = None
    log_file: str | None = None
    url: str | None = None
    container: str | None = None  # id, for a job in a container
    started_at: str  # UTC, ISO 8601
    phase: str = "starting"
    floor_bytes: int | None = None  # the MemAvailable that the watchdog defends
    token_at_s: float | None = None  # monotonic clock, when the engine was last seen to make progress

    @property
    def process(self) -> processes.Process | None:
        """The process itself, or None when it ended, its pid was reused, or the machine was rebooted since."""
        if self.boot_id != processes.boot_id():
            return None
        found = processes.read(self.pid)
        return found if found and found.is_live and found.start_ticks == self.start_ticks else None

    @property
    def is_alive(self) -> bool:
        return self.process is not None

    def describe(self) -> str:
        """Return one line: pid, title, start time and command. Safe to print: the file may be writable by others."""
        line = f"pid {self.pid} ({self.title or shlex.join(self.argv)}), started {self.started_at}"
        return "".join(c if c.isprintable() else "?" for c in line)


def of_process(pid: int, **described: Any) -> Identity:
    """Return the identity of a live process, started now; ``described`` are further fields of ``Identity``.

    Raises: ProcessLookupError, if there is no such process.
    """
    process = processes.read(pid)
    if process is None:
        raise ProcessLookupError(pid)
    return Identity(
        pid=pid,
        start_ticks=process.start_ticks,
        boot_id=processes.boot_id(),
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        **described,
    )


def encode(identity: Identity) -> bytes:
    """Return the record: JSON, padded to ``RECORD_BYTES`` so that it covers its predecessor and needs no new block."""
    shorter = replace(identity, argv=(*identity.argv[:1], "..."), title=identity.title[:80])
    bare = replace(
        shorter, floor_bytes=None, token_at_s=None, argv=(), title="", unit=None, log_file=None, url=None, phase=""
    )
    for candidate in (identity, shorter, bare):
        record = json.dumps(asdict(candidate)).encode()
        if len(record) < RECORD_BYTES:
            break
    return record.ljust(RECORD_BYTES - 1) + b"\n"


def decode(record: bytes) -> Identity | None:
    """Return the identity in a record, or None when it is empty, torn, or from another schema."""
    try:
        fields = json.loads(record.strip(b"\0 \n"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        return None
    argv = fields.get("argv")
    numbers = (fields.get("pid"), fields.get("start_ticks"))
    texts = tuple(fields.get(name) for name in ("boot_id", "uuid", "title", "started_at", "phase"))
    maybe = tuple(fields.get(name) for name in ("unit", "log_file", "url", "container"))
    figures = tuple(fields.get(name) for name in ("floor_bytes", "token_at_s"))
    if not (
        isinstance(argv, list)
        and all(type(number) is int and number > 0 for number in numbers)
        and all(isinstance(text, str) for text in (*argv, *texts))
        and all(text is None or isinstance(text, str) for text in maybe)
        and all(figure is None or type(figure) in (int, float) for figure in figures)
    ):
        return None
    known = {name: fields[name] for name in Identity.__dataclass_fields__ if name in fields}
    return Identity(**{**known, "argv": tuple(argv)})


def read(fd: int) -> Identity | None:
    """Return the identity in a lock file that is open for reading, or None."""
    try:
        return decode(os.pread(fd, RECORD_BYTES, 0))
    except OSError:
        return None
