"""The record in a lock file: it survives anything, and never stands for a process that it does not name."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from thor_spec.guard import identity

ME = identity.of_process(os.getpid(), uuid="u", argv=("vllm", "serve"), title="serve tiny")


@given(st.binary(max_size=identity.RECORD_BYTES))
@example(b"[" * identity.RECORD_BYTES)
@example(b'{"schema": 1, "pid": true}')
@example(identity.encode(ME)[:200])
@example(identity.encode(ME).replace(b'"serve tiny"', b"[]"))
def test_garbage_is_no_identity(record: bytes) -> None:
    assert identity.decode(record) is None


@given(st.lists(st.text(st.characters()), max_size=40), st.text(), st.none() | st.text(max_size=5000))
def test_records_have_one_size_and_come_back(argv: list[str], title: str, log_file: str | None) -> None:
    mine = replace(ME, argv=tuple(argv), title=title, log_file=log_file)
    record = identity.encode(mine)
    back = identity.decode(record)
    assert len(record) == identity.RECORD_BYTES
    assert back is not None
    assert back.is_alive
    assert back.describe().isprintable()
    assert back == mine or len(str(mine).encode(errors="replace")) > 400


def test_a_long_command_keeps_its_head() -> None:
    back = identity.decode(identity.encode(replace(ME, argv=("vllm", *["x" * 100] * 100))))
    assert back is not None
    assert back.argv == ("vllm", "...")


def test_a_newer_field_is_ignored() -> None:
    record = identity.encode(ME).replace(b'{"schema"', b'{"cgroup": "/a", "schema"')
    assert identity.decode(record) == ME


def test_another_start_time_or_boot_is_another_process(bystander: Callable[..., subprocess.Popen[bytes]]) -> None:
    theirs = identity.of_process(bystander().pid, uuid="u")
    assert theirs.is_alive
    assert not replace(theirs, start_ticks=theirs.start_ticks + 1).is_alive
    assert not replace(theirs, boot_id="another boot").is_alive
    assert not replace(theirs, pid=2**22 + 1).is_alive
