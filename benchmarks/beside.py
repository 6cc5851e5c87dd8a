"""Engines beside others, which the guard refuses for good reason: a guarded command, or a benchmark with servers.

    python benchmarks/beside.py verify lossless nano-hybrid --kv-cache-memory 1GiB
    python benchmarks/beside.py benchmarks/acceptance.py --kv-cache-memory 1GiB

Its locks lie in a folder of its own, others' engines are nobody's orphans, and memory that others took meanwhile is not
waited for. It is for machines that do nothing but measure: ``all.py`` sees to it that the engines fit.
"""

import os
import runpy
import sys
import tempfile
from pathlib import Path

from thor_spec.guard import memory_return, orphans


def main() -> None:
    orphans.find = lambda *_, **__: ()  # type: ignore[assignment]
    memory_return.await_return = lambda *_, **__: None  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(THOR_SPEC_RUNTIME_DIR=f"{folder}/run", THOR_SPEC_STATE_DIR=f"{folder}/state")
        run(sys.argv[1:])


def run(argv: list[str]) -> None:
    """Run a script, or ``thor-spec`` with these arguments."""
    if argv and argv[0].endswith(".py"):
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")
        return
    from thor_spec.cli.entry import main as command

    sys.argv = ["thor-spec", *argv]
    command()


if __name__ == "__main__":
    main()
