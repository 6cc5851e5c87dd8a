"""The record that every stop leaves, for ``thor-spec status --last``.

It informs people and decides nothing. Where it cannot be stored, it is kept in memory and said so; no job ends for it.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from thor_spec import whole_file
from thor_spec.guard import processes

SCHEMA = 1
NAME = "last.json"
LOG_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRecord:
    """How one job ended. Sizes in bytes, times in seconds."""

    schema: int = SCHEMA
    cause: str
    exit_code: int | None
    trigger: Mapping[str, Any] | None = None
    margin_bytes: int | None = None
    """MemAvailable above the floor at the end; negative below it."""
    least_margin_bytes: int | None = None
    phase: str = ""
    uptime_s: float | None = None
    log_tail: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    uuid: str = ""
    title: str = ""
    pid: int | None = None
    log_file: str | None = None
    dump: str | None = None
    boot_id: str = ""
    utc: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-ready."""
        return asdict(self)


def stamped(record: Mapping[str, Any]) -> StopRecord:
    """Return a record of these fields, with this boot and this moment."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return StopRecord(**{**record, "boot_id": processes.boot_id(), "utc": now})


class StateStore:
    """Where records go; ``kept`` is the last one given, stored or not."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self.kept: StopRecord | None = None

    def write(self, record: StopRecord) -> str | None:
        """Store the record over its predecessor; return None, or why it is kept in memory only."""
        self.kept = record
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            whole_file.write(self.path, json.dumps(record.as_dict()) + "\n")
        except OSError as error:
            return (
                f"The stop record cannot be stored in {self.path.parent} ({error.strerror}), so `thor-spec status "
                "--last` will not show it. Free space there, or name another directory in THOR_SPEC_STATE_DIR."
            )
        return None

    def read(self) -> StopRecord | None:
        """Return the stored record, or None when there is none or it is torn or from another schema."""
        try:
            fields = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(fields, dict) or fields.get("schema") != SCHEMA or "cause" not in fields:
            return None
        known = {name: fields[name] for name in StopRecord.__dataclass_fields__ if name in fields}
        for name in ("log_tail", "notices"):
            known[name] = tuple(map(str, known.get(name) or ()))
        return StopRecord(**{"exit_code": None, **known})


def last_lines(path: str | Path | None, count: int = LOG_LINES, *, block_bytes: int = 64 << 10) -> tuple[str, ...]:
    """Return the last lines of a log, without reading all of it; empty where it cannot be read."""
    if path is None:
        return ()
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - block_bytes))
            text = file.read().decode(errors="replace").replace("\r", "\n")
    except OSError:
        return ()
    return tuple(line for line in text.split("\n") if line.strip())[-count:]
