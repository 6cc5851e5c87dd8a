"""The stop record: stored where it can be, kept in memory where not, and shown by the command line."""

import json
import os
from pathlib import Path

import pytest

from thor_spec.cli.main import main
from thor_spec.errors import LockPathError
from thor_spec.guard import identity, state
from thor_spec.guard.locks import ADMISSION, RESIDENCY, LockDirectory
from thor_spec.guard.state import StateStore, stamped


def record(**fields: object) -> state.StopRecord:
    return stamped({"cause": "a test", "exit_code": 30, **fields})


def test_a_record_comes_back(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "new" / "state")
    kept = record(log_tail=("one", "two"), trigger={"kind": "floor"}, margin_bytes=-5)
    assert store.read() is None
    assert store.write(kept) is None
    assert StateStore(tmp_path / "new" / "state").read() == kept
    assert not list((tmp_path / "new" / "state").glob("*.tmp"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99, "cause": "x"}', '{"schema": 1}', "[" * 9999])
def test_garbage_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "last.json").write_text(text)
    assert StateStore(tmp_path).read() is None


def test_a_newer_field_is_ignored_and_a_missing_one_is_none(tmp_path: Path) -> None:
    (tmp_path / "last.json").write_text('{"schema": 1, "cause": "x", "of the future": 1}')
    found = StateStore(tmp_path).read()
    assert found is not None
    assert (found.cause, found.exit_code, found.log_tail) == ("x", None, ())


def test_row12_a_full_disk_keeps_the_record_in_memory(tmp_path: Path) -> None:
    (tmp_path / "last.tmp").symlink_to("/dev/full")
    store = StateStore(tmp_path)
    problem = store.write(record())
    assert problem is not None
    assert "No space left on device" in problem
    assert "THOR_SPEC_STATE_DIR" in problem
    assert store.kept is not None
    assert store.read() is None


def test_row12_the_lock_record_needs_no_new_block(locks: LockDirectory) -> None:
    lock = locks.take(ADMISSION)
    before = os.fstat(lock.fd)
    lock.write(identity.of_process(os.getpid(), uuid="u" * 36, argv=("engine", "x" * 10_000)))
    after = os.fstat(lock.fd)
    lock.release()
    assert (after.st_size, after.st_blocks) == (before.st_size, before.st_blocks)
    assert after.st_size == identity.RECORD_BYTES


def test_row21_a_read_only_directory_keeps_the_record_in_memory() -> None:
    store = StateStore(Path("/proc/thor-spec"))
    problem = store.write(record())
    assert problem is not None
    assert "cannot be stored in /proc/thor-spec" in problem
    assert store.kept is not None


def test_row21_missing_lock_files_are_14(locks: LockDirectory) -> None:
    locks.take(ADMISSION).release()
    (locks.path / RESIDENCY).unlink()
    with pytest.raises(LockPathError) as raised:
        locks.take(ADMISSION)
    assert raised.value.exit_code == 14


def test_last_lines_reads_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {i}\n" for i in range(10_000)) + "50%\r100%")
    assert state.last_lines(path, 3) == ("line 9999", "50%", "100%")
    assert state.last_lines(path, 3, block_bytes=8) == ("50%", "100%")
    assert state.last_lines(tmp_path / "absent") == ()
    assert state.last_lines(None) == ()


def test_status_last_shows_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THOR_SPEC_STATE_DIR", str(tmp_path))

    def call(*argv: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["status", "--last", *argv])
        assert not ended.value.code
        return capsys.readouterr().out

    assert call() == "no record\n"
    assert call("--json") == "null\n"
    trigger = {"kind": "floor", "value": "MemAvailable 3.50 GiB", "limit": "below"}
    kept = record(title="serve tiny", phase="ready", log_tail=("the end",), margin_bytes=-(1 << 29), trigger=trigger)
    StateStore(tmp_path).write(kept)
    text = call()
    for part in ("serve tiny", "a test", "exit code  30", "ready", "-0.50 GiB", "floor: MemAvailable", "| the end"):
        assert part in text
    assert json.loads(call("--json"))["exit_code"] == 30
    StateStore(tmp_path).write(state.StopRecord(cause="x", exit_code=None, boot_id="earlier", utc="2026-01-01"))
    assert "before the last boot" in call()
