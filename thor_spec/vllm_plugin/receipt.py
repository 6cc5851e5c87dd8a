"""Proof, left by an engine process, that the plugin is at work in it.

vLLM logs a plugin that fails to load and goes on without it; the launcher therefore waits for a receipt from a process
of its own job instead of trusting the log.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from thor_spec import env, whole_file
from thor_spec.errors import ThorSpecError, with_exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What one process says about the plugin in it."""

    pid: int
    state: Literal["active", "engine", "failed"]
    """``active``: registered; ``engine``: our model state drives the runner; ``failed``: ``error`` says why."""
    vllm: str = ""
    model_state: str = ""
    runner_kernels: str = ""
    replaced_kernels: tuple[str, ...] = ()
    recurrent_state: str = ""
    """What a sequence keeps on Gated-DeltaNet layers, in words."""
    rope: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What ``target`` and ``drafter`` rotate by, read back from the loaded models; empty where no type was asked."""
    error: str = ""
    exit_code: int = 0


def leave(receipt: Receipt) -> None:
    """Write ``receipt`` for the launcher, if one waits for it; a later receipt of the same process replaces it."""
    if (folder := env.receipts_dir()) is None:
        return
    whole_file.write(folder / f"{receipt.pid}.json", json.dumps(asdict(receipt)))


@contextmanager
def of_failure() -> Iterator[None]:
    """Leave a receipt of an expected failure on its way up: the launcher reports it instead of an echo in the log."""
    try:
        yield
    except ThorSpecError as error:
        leave(Receipt(pid=os.getpid(), state="failed", error=str(error), exit_code=error.exit_code))
        raise


def collect(folder: Path) -> list[Receipt]:
    """Return the receipts in ``folder``, failures first."""
    receipts = [Receipt(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.json"))]
    return sorted(receipts, key=lambda r: ("failed", "engine", "active").index(r.state))


def require_none_failed(folder: Path) -> None:
    """Raises: what a process of the engine failed with, as far as it left a receipt of it; a ThorSpecError."""
    for found in collect(folder):
        if found.state == "failed":
            raise with_exit_code(found.exit_code)(found.error)
