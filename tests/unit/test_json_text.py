"""JSON that people hand over, wherever they do: what is wrong with it is told, and never a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from thor_spec import json_text, record
from thor_spec.bench import traces
from thor_spec.capacity import source
from thor_spec.errors import ConfigError
from thor_spec.eval import ruler
from thor_spec.eval.corpus import texts
from thor_spec.serve import checkpoint, golden, passthrough, rope

DEEP = "[" * 100_000
CUT = "a cut \\ud83d"
BREAKS = "one\u2028two\u0085three\x0cfour"


def corpus(file: Path) -> list[str]:
    return list(texts(str(file), 0))


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "corpus": ("c.jsonl", corpus),
    "questions": ("q.jsonl", ruler.read_questions),
    "recording": ("r.jsonl", traces.read),
    "trace": ("t.json", traces.read),
    "golden": ("g.json", golden.read),
    "record": ("record.json", record.read),
    "config": ("config.json", source.read_config),
    "checkpoint": ("config.json", lambda file: checkpoint.open_checkpoint("x", file.parent)),
    "factors": ("f.json", rope._factors),
    "flag": ("flag", lambda file: passthrough.require_json("--x", file.read_text())),
}


@pytest.mark.parametrize("name", READERS)
def test_what_nests_too_deeply_is_refused(name: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    (tmp_path / file).write_text(DEEP)
    with pytest.raises(ConfigError, match="nested too deeply"):
        read(tmp_path / file)


@pytest.mark.parametrize("name", ["corpus", "questions", "recording"])
def test_a_line_ends_where_a_line_of_json_does(name: str, tmp_path: Path) -> None:
    lines = {
        "corpus": {"text": BREAKS},
        "questions": {"question": BREAKS, "context": "c", "answers": ["a"]},
        "recording": {"messages": [{"role": "user", "content": BREAKS}]},
    }
    file, read = READERS[name]
    line = json.dumps(lines[name], ensure_ascii=False).replace("\\f", "\\u000c")
    for end in ("\n", "\r\n", ""):
        (tmp_path / file).write_text(line + end, encoding="utf-8", newline="")
        found = json.dumps(read(tmp_path / file), ensure_ascii=False)
        assert json.dumps(BREAKS, ensure_ascii=False) in found


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("questions", f'{{"question": "{CUT}", "context": "c", "answers": []}}'),
        ("recording", f'{{"messages": [{{"role": "user", "content": "{CUT}"}}]}}'),
        ("golden", f'[{{"prompt": "{CUT}", "text": "x"}}]'),
    ],
)
def test_half_a_character_is_refused_before_anything_is_asked(name: str, content: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match="half a character"):
        read(tmp_path / file)


def test_half_a_character_of_a_corpus_is_read_as_what_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "c.jsonl"
    file.write_text(f'{{"text": "{CUT}"}}\n{{"text": "whole \\ud83d\\ude00"}}\n')
    assert corpus(file) == ["a cut \ufffd", "whole \U0001f600"]


def test_questions_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        ruler.read_questions(tmp_path / "q.jsonl")


@pytest.mark.parametrize("item", [{"prompt": 3, "text": "x"}, {"prompt": "x", "text": None}, "x"])
def test_golden_answers_are_texts(item: object, tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(json.dumps([item]))
    with pytest.raises(ConfigError, match="must be a JSON list"):
        golden.read(tmp_path / "g.json")


def test_lines() -> None:
    assert json_text.lines("") == []
    assert json_text.lines("1\n2\n") == json_text.lines("1\n2") == ["1", "2"]
