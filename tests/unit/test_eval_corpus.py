"""Texts from a path and from a seed."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from thor_spec.errors import ConfigError
from thor_spec.eval import perplexity
from thor_spec.eval.corpus import texts
from thor_spec.eval.text import Encoded


def test_a_folder_gives_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "last.txt").write_text("three")
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "a.bin").write_text("not text")
    (tmp_path / "aa.jsonl").write_text(json.dumps({"text": "two"}) + "\n" + json.dumps({"text": " "}))
    assert list(texts(str(tmp_path), 0)) == ["one", "two", "three"]
    parquet.write_table(pa.table({"text": ["four", "five"], "other": [1, 2]}), tmp_path / "p.parquet")
    assert list(texts(str(tmp_path / "p.parquet"), 0)) == ["four", "five"]


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No corpus"):
        texts(str(tmp_path / "nothing"), 0)
    with pytest.raises(ConfigError, match="holds no text"):
        texts(str(tmp_path), 0)
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"txt": 1}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl:2"):
        list(texts(str(tmp_path / "bad.jsonl"), 0))
    parquet.write_table(pa.table({"words": ["x"]}), tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match="no column"):
        list(texts(str(tmp_path / "p.parquet"), 0))


def test_made_up_texts_follow_the_seed_and_come_back_to_what_they_said() -> None:
    first, second = islice(texts("synthetic", 1), 2)
    assert [first, second] == list(islice(texts("synthetic", 1), 2))
    assert first != second != next(texts("synthetic", 2))
    said: dict[str, int] = {}
    recalled = distance = 0
    for place, line in enumerate(first.splitlines()):
        words = line.removesuffix(".").split()
        if "hid" in words:
            said[words[-1]] = place
        elif "remember," in words:
            recalled += 1
            distance = max(distance, place - said[words[-1]])
    assert recalled > 100
    assert distance > 1000


def test_short_documents_are_joined_without_encoding_the_text_for_each(tmp_path: Path) -> None:
    lines = (json.dumps({"text": f"Sentence {i} of the corpus."}) for i in range(4000))
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    encoded: list[int] = []

    class Counting:
        def encode(self, text: str) -> Encoded:
            encoded.append(len(text))
            return Encoded(list(range(len(text))), [(i, i + 1) for i in range(len(text))])

    tokenizer: Any = Counting()
    found = list(perplexity.sequences(str(tmp_path / "c.jsonl"), tokenizer, 30_000, 2, 0))
    assert [(len(text), len(ids)) for text, ids in found] == [(30_000, 30_000)] * 2
    assert len(encoded) < 24
