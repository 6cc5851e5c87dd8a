"""The corpus: the same sources give the same bytes, and what is held out stays out."""

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from thor_spec.train import data
from tools.train_nano import baseline, chat, corpus, extract, pack, sources

from .conftest import VOCABULARY, write_archive


def test_a_rebuild_gives_the_same_bytes(mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "HELD_OUT_EVERY", 5)
    source = write_archive(tmp_path / "archives")
    # gzip stamps the archive with the time, so the pin differs; what is in it does not.
    again = corpus.build(tmp_path / "data", tmp_path / "archives", [source], 40, VOCABULARY)
    first = json.loads((mini / "manifest.json").read_text())
    assert again["files"] == first["files"]
    assert again["sources"][0]["texts_sha256"] == first["sources"][0]["texts_sha256"]


def test_another_archive_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    source = write_archive(tmp_path)
    (tmp_path / "mini-1.0.tar.gz").write_bytes(b"other")
    with pytest.raises(SystemExit, match="not the pinned"):
        sources.fetch([source], tmp_path)


@pytest.mark.parametrize(("kind", "says"), [("debian", "Run `apt-get update`"), ("pypi", "package index")])
def test_a_source_that_cannot_be_had_says_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Literal["debian", "pypi"], says: str
) -> None:
    monkeypatch.setattr(sources, "_download", lambda *_: None)
    source = sources.Source(kind=kind, name="gone", version="1", licence="MIT", sha256="0" * 64)
    with pytest.raises(SystemExit, match=rf"gone 1 could not be fetched into .*{says}"):
        sources.fetch([source], tmp_path)


def test_every_pinned_source_names_a_licence_and_a_hash() -> None:
    for source in sources.pinned():
        assert source.licence
        assert source.kind == "stdlib" or len(source.sha256) == 64


def test_held_out_files_and_the_talk_about_them_are_not_trained_on(packed: data.Corpus) -> None:
    text = packed.tokenizer().decode(packed.segment("train").tolist(), skip_special_tokens=False)
    for kind in ("code", "chat"):  # the mini corpus takes its prose from its code
        held_out = packed.tokenizer().decode(packed.segment(f"held-out {kind}").tolist(), skip_special_tokens=False)
        pieces = [piece for piece in held_out.split("<|endoftext|>") if len(piece) > 300]
        assert pieces
        assert not any(piece in text for piece in pieces)


def test_text_survives_the_vocabulary(packed: data.Corpus) -> None:
    tokenizer = packed.tokenizer()
    for text in ("def f(x):\n\treturn x  # ✓\n", "naïve 日本 \x00\x07", "<tool_call>\n{}\n</tool_call>"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert packed.marks().mask < packed.vocabulary


def test_bytes_are_counted_as_the_tokenizer_writes_them(packed: data.Corpus) -> None:
    text = "for key, value in mapping.items():\n    print('é', value)\n"
    ids = packed.tokenizer().encode(text).ids
    assert packed.token_bytes()[ids].sum() == len(text.encode())


def test_prompts_of_conversations_end_where_the_assistant_begins(packed: data.Corpus) -> None:
    rows = packed.prompts()["chat"]
    assert rows
    for row in rows:
        assert packed.tokenizer().decode(row, skip_special_tokens=False).endswith("<|im_start|>assistant\n")


def test_conversations_are_rendered_as_transformers_renders_them(mini: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(mini)
    code = '''
def scale(image, factor: float, smooth: bool = True):
    """Return the image enlarged by a factor, for printing.

    >>> scale([1], 2)
    [1, 1]
    """
    return [pixel for pixel in image for _ in range(int(factor))]
'''
    render = chat.renderer((mini / "chat_template.jinja").read_text())
    seen = set()
    for index in range(60):
        document = extract.Document(f"x/{index}.py", "code", code)
        for _, messages, tools in chat.conversations(document):
            seen.add((bool(tools), len(messages)))
            assert render(messages, tools) == tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert {has_tools for has_tools, _ in seen} == {False, True}


def test_the_byte_model_is_a_distribution() -> None:
    text = np.frombuffer(b"abracadabra, said the wizard; abracadabra! " * 4, np.uint8)
    total = 0.0
    for last in range(256):
        held_out = np.append(text[:4], last).astype(np.uint8)
        total += 2 ** -baseline.ngram_bits(text, held_out, 5)
    assert total == pytest.approx(1.0)
    assert baseline.ngram_bits(text, text, 5) < baseline.ngram_bits(text, text, 2) < baseline.unigram_bits(text, text)


def test_what_is_carried_is_bounded(mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "MiB in 6 files" in pack.pack(mini, tmp_path / "out")
    assert data.load(tmp_path / "out").vocabulary == VOCABULARY
    monkeypatch.setattr(pack, "LIMIT", 1000)
    with pytest.raises(SystemExit, match="more than"):
        pack.pack(mini, tmp_path / "out")
