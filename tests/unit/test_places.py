"""Where results go: what cannot be written is told before anything is measured, in every command that writes."""

from pathlib import Path

import pytest

from thor_spec import record
from thor_spec.cli.main import main
from thor_spec.errors import ConfigError
from thor_spec.eval import run
from thor_spec.gates import judging

MODEL = ("tiny-hybrid", "--kv-cache-memory", "256MiB")
COMMANDS = (
    *(("bench", kind, *MODEL) for kind in ("chat", "serving", "agent")),
    *(("verify", gate, *MODEL) for gate in ("lossless", "distribution", "controls", "prefix-cache", "all")),
    ("verify", "tree", *MODEL),
)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_args: object, **_more: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr(judging, "while_served", start)
    monkeypatch.setattr("thor_spec.gates.tree.run", start)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    err = capsys.readouterr().err
    assert ended.value.code == 2, err
    return err


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_record_finds_its_place_before_an_engine_starts(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    taken, closed = tmp_path / "taken", Path("/proc/x/y")
    record.write("bench-chat", {}, folder=taken)
    assert "is there already" in refusal(capsys, *command, "--out", str(taken))
    assert "cannot be written" in refusal(capsys, *command, "--out", str(closed))
    Path("evidence").write_text("in the way of the usual folder")
    assert "evidence cannot be written" in refusal(capsys, *command)


def test_reserving_leaves_the_folder_to_the_record(tmp_path: Path) -> None:
    record.reserve(tmp_path / "a" / "b")
    assert not list((tmp_path / "a" / "b").iterdir())
    record.write("bench-chat", {}, folder=tmp_path / "a" / "b")
    with pytest.raises(ConfigError, match="is there already"):
        record.reserve(tmp_path / "a" / "b")


def test_an_evaluation_takes_no_folder_of_another_record(tmp_path: Path) -> None:
    record.write("bench-chat", {}, folder=tmp_path)
    with pytest.raises(ConfigError, match="is there already"):
        run.claim(tmp_path, {})
    with pytest.raises(ConfigError, match="cannot be written"):
        run.claim(Path("/proc/x/y"), {})


def test_tuning_needs_a_folder_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be written" in refusal(capsys, "tune", "moe", "tiny-hybrid", "--out", "/proc/x/y")


def test_the_page_goes_where_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.write("verify-lossless", {"options": {}, "verdicts": [], "passed": True}, folder=tmp_path / "r")
    for out in ("/proc/x/page.html", str(tmp_path)):
        assert f"{out} cannot be written" in refusal(capsys, "report", str(tmp_path), "--out", out)
