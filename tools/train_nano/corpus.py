"""Builds the corpus: one file of token ids, a tokenizer, and a manifest that says where every token came from."""

import hashlib
import json
import lzma
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thor_spec.nano import tokenizer as tiny

from . import baseline, bpe, chat, extract, sources
from .extract import Document

Tokens = dict[str, NDArray[np.uint16]]  # by the document's name

SCHEMA = 1
TOKENIZER_BYTES = 24_000_000  # of text the vocabulary is learnt from: more changes little
BASELINE_BYTES = 40_000_000  # of text that the byte models count
PROMPTS = 64  # held-out prompts of each kind
PROMPT_TOKENS = 192
KINDS: tuple[extract.Kind, ...] = ("code", "prose", "chat")
TALKS = 12_000
PACKING = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1}]  # two bytes a token
CHAT_SHARE = 0.16  # of the tokens; conversations beyond it are left out, later ranks first


def build(
    output: Path, archives: Path, wanted: list[sources.Source], talks: int = TALKS, vocabulary: int = bpe.VOCABULARY
) -> dict[str, Any]:
    """Write the corpus into ``output`` and return its manifest. Same sources and interpreter, same bytes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    found = sources.fetch(wanted, archives)
    kept = extract.unique(
        document for source in wanted for document in extract.documents(source, found.get(source.name))
    )
    kept = sorted([*kept, *_conversations(kept, talks)], key=lambda document: document.rank)
    output.mkdir(parents=True, exist_ok=True)
    learnt = bpe.learn(_sample(kept), vocabulary)
    bpe.save(learnt, output)
    tokens = _tokens(learnt, kept)
    chosen = _limit_chat(kept, tokens)
    end = learnt.token_to_id(tiny.END_OF_TEXT)
    parts: list[Any] = []
    segments: dict[str, list[int]] = {}
    for name, members in _segments(chosen).items():
        begin = sum(map(len, parts))
        parts += [np.append(tokens[document.name], np.uint16(end)) for document in members]
        segments[name] = [begin, sum(map(len, parts))]
    ids = np.concatenate(parts)
    (output / "tokens.u16.xz").write_bytes(lzma.compress(ids.tobytes(), filters=PACKING))
    (output / "prompts.json").write_text(json.dumps(_prompts(learnt, chosen, tokens)) + "\n", encoding="utf-8")
    manifest = {
        "schema": SCHEMA,
        "interpreter": extract.interpreter(),
        "vocabulary": vocabulary,
        "segments": segments,
        "sources": [_account(source, chosen, tokens) for source in wanted],
        "conversations": {
            "documents": sum(d.kind == "chat" for d in chosen),
            "tokens": sum(len(tokens[d.name]) for d in chosen if d.kind == "chat"),
        },
        "bytes": {name: sum(len(d.text.encode()) for d in members) for name, members in _segments(chosen).items()},
        "baselines": _baselines(chosen),
        "files": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(output.iterdir())
            if path.name != "manifest.json"
        },
    }
    (output / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def _conversations(kept: list[Document], talks: int) -> list[Document]:
    render = chat.renderer(tiny.chat_template())
    made = [
        Document(name, "chat", render(messages, tools))
        for document in kept
        if document.kind == "code"
        for name, messages, tools in chat.conversations(document)
    ]
    talk = [*chat.small_talk(talks), *chat.tool_talk(talks // 2)]
    return made + [Document(name, "chat", render(messages, tools)) for name, messages, tools in talk]


def _held_out(document: Document) -> bool:
    """Return whether the document is for evaluation: a conversation follows the file that it was made from."""
    if document.kind == "chat":
        return Document(document.name.removeprefix("chat:").rpartition("#")[0], "code", "").is_held_out
    return document.is_held_out


def _sample(kept: Iterable[Document]) -> list[str]:
    """Return texts of about ``TOKENIZER_BYTES``, marks taken out: they are no letters."""
    texts, size = [], 0
    for document in kept:
        if _held_out(document):
            continue
        text = document.text
        for mark in tiny.MARKS:
            text = text.replace(mark, "")
        texts.append(text)
        size += len(text)
        if size > TOKENIZER_BYTES:
            break
    return texts


def _tokens(learnt: Any, kept: list[Document]) -> Tokens:
    tokens: Tokens = {}
    for begin in range(0, len(kept), 512):
        batch = kept[begin : begin + 512]
        for document, encoding in zip(batch, learnt.encode_batch([d.text for d in batch]), strict=True):
            tokens[document.name] = np.asarray(encoding.ids, np.uint16)
    return tokens


def _limit_chat(kept: list[Document], tokens: Tokens) -> list[Document]:
    room = CHAT_SHARE / (1 - CHAT_SHARE) * sum(len(tokens[d.name]) for d in kept if d.kind != "chat")
    chosen = []
    for document in kept:
        if document.kind == "chat" and not document.name.startswith("chat:talk#"):
            room -= len(tokens[document.name])
            if room < 0:
                continue
        chosen.append(document)
    return chosen


def _segments(chosen: list[Document]) -> dict[str, list[Document]]:
    """Return the documents of the training text, and of the held-out text of each kind."""
    segments = {"train": [d for d in chosen if not _held_out(d)]}
    return segments | {f"held-out {kind}": [d for d in chosen if _held_out(d) and d.kind == kind] for kind in KINDS}


def _prompts(learnt: Any, chosen: list[Document], tokens: Tokens) -> dict[str, list[list[int]]]:
    """Return held-out prompts by kind: beginnings of files, and conversations up to the assistant's first word."""
    prompts: dict[str, list[list[int]]] = {}
    start, opening = learnt.token_to_id(tiny.IM_START), learnt.encode("assistant\n").ids
    for kind in KINDS:
        rows = []
        for document in _segments(chosen)[f"held-out {kind}"]:
            ids = tokens[document.name].tolist()
            if kind == "chat":
                ends = (i + 1 + len(opening) for i, token in enumerate(ids) if token == start)
                row = ids[: next((end for end in ends if ids[end - len(opening) : end] == opening), 0)]
            else:
                row = ids[:PROMPT_TOKENS] if len(ids) > 2 * PROMPT_TOKENS else []
            if 8 <= len(row) <= 2 * PROMPT_TOKENS:
                rows.append(row)
        prompts[kind] = rows[:PROMPTS]
    return prompts


def _account(source: sources.Source, chosen: list[Document], tokens: Tokens) -> dict[str, Any]:
    own = [document for document in chosen if document.name.startswith(source.name + "/")]
    digest = hashlib.sha256()
    for document in own:
        digest.update(hashlib.sha256(document.text.encode()).digest())
    return {
        "kind": source.kind,
        "name": source.name,
        "version": source.version,
        "licence": source.licence,
        "sha256": source.sha256,
        "documents": len(own),
        "tokens": sum(len(tokens[document.name]) for document in own),
        "texts_sha256": digest.hexdigest(),
    }


def _baselines(chosen: list[Document]) -> dict[str, dict[str, float]]:
    def raw(members: list[Document]) -> baseline.Bytes:
        return np.frombuffer("".join(d.text for d in members).encode(), np.uint8)

    segments = _segments(chosen)
    train = raw(segments.pop("train"))[:BASELINE_BYTES]
    return {
        name: {
            "unigram": round(baseline.unigram_bits(train, raw(members)), 4),
            "5-gram": round(baseline.ngram_bits(train, raw(members)), 4),
        }
        for name, members in segments.items()
        if members
    }
