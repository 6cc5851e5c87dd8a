"""Collects what a GPU host without a network needs into one folder: the corpus, and nothing that the host has."""

from pathlib import Path

from thor_spec.train import data

CARRIED = ("manifest.json", "prompts.json", "tokens.u16.xz", *data.TOKENIZER_FILES)
LIMIT = 60 << 20


def pack(corpus: Path, out: Path) -> str:
    """Copy the corpus into ``out`` and return a line on its size. Raises: SystemExit, when it is too large."""
    out.mkdir(parents=True, exist_ok=True)
    for name in CARRIED:
        (out / name).write_bytes((corpus / name).read_bytes())
    size = sum((out / name).stat().st_size for name in CARRIED)
    if size > LIMIT:
        raise SystemExit(f"{out} holds {size / 2**20:.1f} MiB, more than {LIMIT >> 20}. Lower extract.LARGEST_SOURCE.")
    return f"{out}: {size / 2**20:.1f} MiB in {len(CARRIED)} files"
