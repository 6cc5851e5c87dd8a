"""Texts to evaluate on: from a local path, or made up from a seed."""

import random
from collections.abc import Iterator
from pathlib import Path

from thor_spec import json_text
from thor_spec.errors import ConfigError, PlatformError

SYNTHETIC = "synthetic"
_TEXT = (".txt", ".md", ".rst", ".py", ".text")
_NAMES = tuple(
    "Ada Bela Cyrus Dora Emil Fay Gus Hana Ivo June Kurt Lena Milo Nora Otto Pia Quinn Rosa Sven Thea Uma Vera".split()  # noqa: SIM905
)
_PLACES = ("mill", "harbour", "attic", "market", "station", "garden", "library", "bakery", "bridge", "school", "tower")
_GOODS = ("eggs", "apples", "lamps", "ropes", "books", "keys", "bricks", "candles", "maps", "clocks", "nails")
_DEEDS = ("sold", "bought", "counted", "carried", "packed", "repaired", "painted", "lost", "found", "weighed")


def texts(source: str, seed: int) -> Iterator[str]:
    """Yield the texts of a corpus: without end, from a seed, for ``synthetic``, else those in a file or folder, once.

    A folder's files come in the order of their paths; a jsonl or parquet file has one text in each ``text`` field.

    Raises: ConfigError, where nothing can be read; PlatformError, for parquet without pyarrow.
    """
    if source == SYNTHETIC:
        return _ledgers(seed)
    path = Path(source)
    if not path.exists():
        raise ConfigError(f"No corpus at {path}. Name a file, a folder, or {SYNTHETIC}.")
    files = (
        [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (*_TEXT, ".jsonl", ".parquet"))
    )
    if not files:
        raise ConfigError(f"{path} holds no text: {', '.join(_TEXT)}, .jsonl or .parquet.")
    return (text for file in files for text in _read(file) if text.strip())


def _read(file: Path) -> Iterator[str]:
    if file.suffix == ".parquet":
        yield from _parquet(file)
        return
    try:
        content = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from error
    if file.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(json_text.lines(content), 1):
        try:
            text = str(json_text.loads(line)["text"])
            # Half a character, which JSON can spell, is no text to a tokenizer; read as what is no UTF-8 is.
            yield text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}:{number} is not an object with a text ({error}).") from error


def _parquet(file: Path) -> Iterator[str]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise PlatformError("A parquet corpus needs pyarrow: pip install 'thor-spec[eval]'.") from error
    try:
        for batch in parquet.ParquetFile(file).iter_batches(columns=["text"]):
            yield from (str(text) for text in batch.column(0).to_pylist() if text)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{file} has no column of texts named text ({error}).") from error


def _ledgers(seed: int) -> Iterator[str]:
    """Yield ledgers whose numbers come back later: what is said again can be known, if the far past is seen."""
    number = 0
    while True:
        yield _ledger(random.Random(f"{seed}:{number}"))
        number += 1


def _ledger(rng: random.Random) -> str:
    codes: list[tuple[str, str, int]] = []
    lines = []
    for day in range(1, 2001):
        roll = rng.random()
        if roll < 0.1 or not codes:
            codes.append((rng.choice(_NAMES), rng.choice(_PLACES), rng.randrange(10_000, 100_000)))
            who, where, code = codes[-1]
            lines.append(f"Day {day}: {who} hid a box at the {where}, and it has code {code}.")
        elif roll < 0.2:
            who, where, code = rng.choice(codes)
            lines.append(f"Day {day}: remember, the box of {who} at the {where} has code {code}.")
        else:
            who, deed, count = rng.choice(_NAMES), rng.choice(_DEEDS), rng.randrange(2, 60)
            lines.append(f"Day {day}: {who} {deed} {count} {rng.choice(_GOODS)} at the {rng.choice(_PLACES)}.")
    return "\n".join(lines) + "\n"
