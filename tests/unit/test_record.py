"""Records: written once, read back, and without places of anybody's machine."""

import json
from pathlib import Path

import pytest

from thor_spec import record
from thor_spec.errors import ConfigError


def test_only_whole_names_of_folders_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(record._TREE) + "-home")
    told = f"{record._TREE}/a {record._TREE}-home/b {record._TREE}s/c"
    assert record.without_places(told) == f"./a ~/b {record._TREE}s/c"


@pytest.mark.parametrize("tree", ["/", "/usr/lib"])
def test_the_root_is_no_folder_of_anybody(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(record, "_TREE", Path(tree))
    assert record.without_places("http://127.0.0.1:8000/v1 /tmp/a") == "http://127.0.0.1:8000/v1 /tmp/a"


def test_records_are_written_once_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = record.write("bench-chat", {"home": str(Path.home() / "x"), "value": 3})
    assert path.parent.parent == Path("evidence")
    found = record.read(path)
    assert (found.name, found.content["value"], found.content["home"]) == ("bench-chat", 3, "~/x")
    assert found.content["provenance"]["argv"]
    with pytest.raises(ConfigError, match="is there already"):
        record.write("again", {}, folder=path.parent)
    with pytest.raises(ConfigError, match=r"holds no record\.json"):
        record.find(tmp_path / "nowhere")
    path.write_text(json.dumps({"schema": 99, "name": "x"}))
    with pytest.raises(ConfigError, match="of schema 99"):
        record.find(tmp_path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is not a record"):
        record.find(tmp_path)
