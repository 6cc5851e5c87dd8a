"""One command per nano checkpoint, and what comes before and after. See README.md beside this file."""

import argparse
import os
import sys
import time
from pathlib import Path

STARTED = time.monotonic()
RESERVE_S = 75.0  # of the time budget, for the evaluation and for writing the checkpoint


def main(argv: list[str] | None = None) -> None:
    """Run one command."""
    options = _parser().parse_args(argv)
    if options.command == "corpus":
        from . import corpus, sources

        manifest = corpus.build(options.out, options.archives or options.out / "archives", sources.pinned())
        print(f"{sum(part['tokens'] for part in manifest['sources'])} tokens from {len(manifest['sources'])} sources")
        return
    if options.command == "pack":
        from . import pack

        print(pack.pack(options.data, options.out))
        return
    if options.command == "ship":
        from . import ship

        print(ship.ship(options.trained, measured=options.measured))
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from . import commands

    out = Path(options.out or os.environ.get("OUT") or sys.exit("Say where to write with --out, or set OUT."))
    getattr(commands, options.command)(commands.Job(options, out / f"nano-{options.command}", STARTED, RESERVE_S))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.train_nano", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    corpus = commands.add_parser("corpus", help="fetch the sources, learn the vocabulary, write the packed corpus")
    corpus.add_argument("--out", type=Path, required=True)
    corpus.add_argument("--archives", type=Path, help="folder of fetched packages; OUT/archives by default")
    pack = commands.add_parser("pack", help="collect what a GPU host needs into one folder")
    pack.add_argument("--data", type=Path, required=True)
    pack.add_argument("--out", type=Path, default=Path(".gpu/nano"))
    ship = commands.add_parser("ship", help="put trained checkpoints into the package")
    ship.add_argument("trained", type=Path, help="folder that holds nano-hybrid, nano-dflash, nano-llada")
    ship.add_argument("--measured", type=Path, help="record of benchmarks/nano.py, for the drafter's card")
    for name, text in (
        ("hybrid", "train nano-hybrid"),
        ("dflash", "train nano-dflash on what nano-hybrid writes"),
        ("llada", "train nano-llada"),
    ):
        train = commands.add_parser(name, help=text)
        train.add_argument("--data", type=Path, required=True, help="folder that the corpus command wrote")
        train.add_argument("--out", type=Path, help="folder of the checkpoint's folder; $OUT by default")
        bound = train.add_mutually_exclusive_group()
        bound.add_argument("--minutes", type=float, help="for the whole command; 9 by default")
        bound.add_argument("--steps", type=int, help="train exactly so many steps")
        train.add_argument("--seed", type=int, default=1)
        train.add_argument("--resume", action="store_true", help="go on from what an interrupted run left")
        train.add_argument("--state", default="out/train_nano", help="folder of that state; out/train_nano by default")
        train.add_argument("--smoke", action="store_true", help="a toy size for CPUs")
        train.add_argument("--device", help="cuda where there is one, else cpu")
        train.add_argument("--no-compile", action="store_true", help="run the layers as they are")
        train.add_argument("--adamw", action="store_true", help="AdamW for the hidden matrices too, instead of Muon")
        train.add_argument("--rate", type=float, help="peak learning rate")
        train.add_argument("--tokens", type=int, help="tokens per step")
        if name == "dflash":
            train.add_argument("--target", type=Path, required=True, help="folder of the trained nano-hybrid")
            train.add_argument("--layers", type=int, help="of the drafter")
            train.add_argument(
                "--sequences", type=int, help="that the target writes; with --minutes, as far as they go"
            )
    return parser


if __name__ == "__main__":
    main()
