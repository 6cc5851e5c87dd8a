"""vLLM's own load generator, without its command line, which the CPU build's metadata breaks.

python -m thor_spec.vllm_plugin.bench_serve OPTIONS OF vllm bench serve
"""

import argparse
import sys
from collections.abc import Sequence

from thor_spec.vllm_plugin import compat


def main(argv: Sequence[str]) -> None:
    """Run one load."""
    parser = argparse.ArgumentParser(prog="vllm bench serve")
    compat.BENCH_SERVE_ARGS.resolve()(parser)
    compat.BENCH_SERVE.resolve()(parser.parse_args(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
