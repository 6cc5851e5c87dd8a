"""A checkpoint's tokenizer, as far as an evaluation needs it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thor_spec.errors import ConfigError


class Encoded(NamedTuple):
    """Token ids, and for each the characters [start, end) that it stands for."""

    ids: list[int]
    spans: list[tuple[int, int]]


class Tokenizer:
    """Turns text into tokens and back, without marks of its own."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Fast

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json, which an evaluation needs. Take the whole checkpoint.")
        self._fast: Any = Fast.from_file(str(file))

    def encode(self, text: str) -> Encoded:
        """Return the tokens of ``text``."""
        encoded = self._fast.encode(text, add_special_tokens=False)
        return Encoded(encoded.ids, encoded.offsets)

    def count(self, text: str) -> int:
        """Return how many tokens ``text`` has."""
        return len(self._fast.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=True)
        return text
