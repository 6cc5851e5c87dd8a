"""The packed corpus as trainers read it: rows of token ids, chosen by seed and step alone."""

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thor_spec.errors import ConfigError
from thor_spec.nano import tokenizer as tiny
from thor_spec.train.shapes import Marks

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids of the whole corpus, and where its parts lie."""

    directory: Path
    ids: Tensor
    """[N] int16 or int32 on the CPU; int16 holds vocabularies below 32768."""
    manifest: dict[str, Any]

    @property
    def vocabulary(self) -> int:
        """Return the size of the models' vocabulary."""
        return int(self.manifest["vocabulary"])

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of held-out text."""
        prefix = "held-out "
        return [name.removeprefix(prefix) for name in self.manifest["segments"] if name.startswith(prefix)]

    def segment(self, name: str) -> Tensor:
        """Return the ids of ``train`` or ``held-out <kind>``, [N]."""
        begin, end = self.manifest["segments"][name]
        return self.ids[begin:end]

    def prompts(self) -> dict[str, list[list[int]]]:
        """Return held-out prompts by kind."""
        prompts: dict[str, list[list[int]]] = json.loads((self.directory / "prompts.json").read_text(encoding="utf-8"))
        return prompts

    def tokenizer(self) -> Any:
        """Return the ``tokenizers.Tokenizer``."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.directory / "tokenizer.json"))

    def marks(self) -> Marks:
        """Return the ids of the marks."""
        find = self.tokenizer().token_to_id
        return Marks(end=find(tiny.END_OF_TEXT), turn_end=find(tiny.IM_END), mask=find(tiny.MASK))

    def token_bytes(self) -> Tensor:
        """Return how many bytes each token writes, [V] float32; marks write none."""
        vocabulary: dict[str, int] = self.tokenizer().get_vocab()
        sizes = torch.zeros(self.vocabulary)
        for text, index in vocabulary.items():
            if text not in tiny.MARKS:
                sizes[index] = len(text)  # a byte-level vocabulary has one letter per byte
        return sizes

    def copy_tokenizer(self, directory: Path) -> None:
        """Write the tokenizer's files into a checkpoint."""
        for name in TOKENIZER_FILES:
            (directory / name).write_bytes((self.directory / name).read_bytes())


def load(directory: Path) -> Corpus:
    """Read a corpus that ``tools.train_nano corpus`` built. Raises: ConfigError, where there is none."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        raw = lzma.decompress((directory / "tokens.u16.xz").read_bytes())
    except (OSError, ValueError, lzma.LZMAError) as error:
        raise ConfigError(
            f"{directory} holds no corpus ({error}). Build one: python -m tools.train_nano corpus --out {directory}."
        ) from error
    ids = torch.frombuffer(bytearray(raw), dtype=torch.int16)
    return Corpus(directory, ids, manifest)


def rows(ids: Tensor, count: int, length: int, *, seed: int, step: int) -> Tensor:
    """Return [count, length] int64: windows of ``ids`` at random places, a function of ``seed`` and ``step``.

    Every step has a generator of its own, so a resumed run sees what an uninterrupted one would have seen.
    """
    chosen = dice(seed, step, "rows")
    starts = torch.randint(0, len(ids) - length + 1, (count, 1), generator=chosen)
    places = (starts + torch.arange(length)).to(ids.device)
    return ids[places].long()


def dice(seed: int, step: int, purpose: str) -> torch.Generator:
    """Return a generator for one purpose of one step."""
    mixed = (seed * 1_000_003 + step) * 7919 + sum(purpose.encode())
    return torch.Generator().manual_seed(mixed)
