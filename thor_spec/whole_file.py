"""Files that a reader finds whole or not at all, whenever it looks and whatever ends the writer."""

from pathlib import Path


def write(file: Path, text: str) -> None:
    """Write a text over what was there; one writer at a time. Raises: OSError, and what was there stays."""
    draft = file.with_suffix(".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(file)
