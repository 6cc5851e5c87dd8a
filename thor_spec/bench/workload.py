"""The requests of ``bench chat``: four kinds, stored in the package, the same for every arm."""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from thor_spec.errors import ConfigError

KINDS = ("code", "chat", "document", "agent")
_CHARACTERS_PER_TOKEN = 1.0  # a byte-level tokenizer's; others fit more text into as many tokens
_DOCUMENT_CHARACTERS = 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, without what an arm adds."""

    kind: str
    path: str
    body: dict[str, Any]
    seed: int


@functools.cache
def _stored() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def sentences() -> list[str]:
    """Return the sentences of which documents are made."""
    return list(_stored()["document"]["text"])


def require_known(kinds: Sequence[str]) -> None:
    """Raise ConfigError, for a kind that there is none of, or no kind at all."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(
            f"--kinds: there are no prompts of kind {', '.join(map(repr, unknown))}. There are: {', '.join(KINDS)}."
        )


def requests(kinds: tuple[str, ...], *, context: int, tokens: int) -> list[Request]:
    """Return the requests of these kinds, in a fixed order and with fixed seeds.

    Args:
        context: tokens that prompt and answer may take; the document is cut to it.
        tokens: of each answer.
    """
    require_known(kinds)
    found: list[tuple[str, str, dict[str, Any]]] = []
    for kind in kinds:
        stored = _stored()[kind]
        if kind == "code":
            found += [(kind, "/v1/completions", {"prompt": prompt}) for prompt in stored]
        elif kind == "document":
            room = min(_DOCUMENT_CHARACTERS, int((context - tokens) * _CHARACTERS_PER_TOKEN) - 200)
            text = document(stored["text"], room)
            found += [(kind, "/v1/completions", {"prompt": f"{text}\n\n{q}"}) for q in stored["questions"]]
        else:
            messages = [[{"role": "user", "content": text}] for text in stored] if kind == "chat" else stored
            found += [(kind, "/v1/chat/completions", {"messages": turns}) for turns in messages]
    return [
        Request(kind=kind, path=path, body={**body, "max_tokens": tokens, "ignore_eos": True}, seed=1000 + i)
        for i, (kind, path, body) in enumerate(found)
    ]


def document(sentences: list[str], characters: int) -> str:
    """Return numbered paragraphs of the sentences, over and over, up to a length."""
    parts: list[str] = []
    length = number = 0
    while True:
        number += 1
        paragraph = f"{number}. {sentences[(number - 1) % len(sentences)]}"
        length += len(paragraph) + 1
        if length > characters and parts:
            return "\n".join(parts)
        parts.append(paragraph)
