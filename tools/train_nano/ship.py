"""Puts trained checkpoints into the package: what serving needs, the cards, and a manifest of hashes."""

import hashlib
import json
from pathlib import Path

from thor_spec.nano import shipped
from thor_spec.nano import tokenizer as tiny
from thor_spec.train import card

LIMIT = 24_000_000  # bytes, all three together
NEAR_TIE = 0.02  # in logits; float32 on another machine differs by less
PROMPTS = (
    "def read_lines(path):\n    with open(path) as file:\n",
    "The module defines the following functions:\n\n",
    "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n",
)
LEFT = ("metrics.json",)  # goes into evidence, not into the package


def ship(trained: Path, package: Path = shipped.FOLDER, measured: Path | None = None) -> str:
    """Copy the checkpoints that ``trained`` holds into ``package`` and return a line about them.

    Args:
        measured: record of ``benchmarks/nano.py``, for the drafter's card.

    Raises: SystemExit, for a smoke-sized checkpoint, or when the three do not fit.
    """
    files: dict[str, bytes] = {}
    for name in shipped.NAMES:
        folder = trained / name
        if not folder.is_dir():
            continue
        if json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["smoke"]:
            raise SystemExit(f"{folder} is of smoke size; only full trainings are shipped.")
        for path in sorted(folder.iterdir()):
            if path.name not in LEFT:
                files[f"{name}/{path.name}"] = path.read_bytes()
    if measured is not None:
        if (card_of := f"{shipped.DRAFTER}/README.md") not in files:
            raise SystemExit(f"{measured} is about a drafter, and {trained} has no {card_of}.")
        record = json.loads(measured.read_text(encoding="utf-8"))
        files[card_of] = card.with_served(files[card_of].decode(), record).encode()
    size = sum(map(len, files.values()))
    if not files or size > LIMIT:
        raise SystemExit(f"{trained} gives {size:,} bytes, allowed are 1 to {LIMIT:,}.")
    for name, content in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(content)
    kept = {path.relative_to(package).as_posix() for path in package.glob("nano-*/*")}
    digests = {name: hashlib.sha256((package / name).read_bytes()).hexdigest() for name in sorted(kept)}
    manifest = {"schema": 1, "files": digests, "greedy": greedy(package / shipped.TARGET)}
    text = json.dumps(manifest, indent=1) + "\n"
    (package / shipped.MANIFEST).write_text(text, encoding="utf-8")
    return f"{len(files)} files, {size:,} bytes, into {package}"


def greedy(directory: Path) -> list[dict[str, list[int]]]:
    """Return prompts and what the target writes after them, up to its end or first near tie: for tests anywhere."""
    if not (directory / "tokenizer.json").is_file():
        return []
    import torch
    from tokenizers import Tokenizer

    from thor_spec.train import hybrid

    model, tokenizer = hybrid.load(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))
    ends = [tokenizer.token_to_id(mark) for mark in (tiny.IM_END, tiny.END_OF_TEXT)]
    found = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        written: list[int] = []
        while len(written) < 32:
            with torch.no_grad():
                best = model.logits(torch.tensor([ids + written]))[0, -1].topk(2)
            if best.values[0] - best.values[1] < NEAR_TIE or best.indices[0] in ends:
                break
            written.append(int(best.indices[0]))
        found.append({"prompt": ids, "tokens": written})
    return found
