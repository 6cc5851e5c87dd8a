"""What our sampler adds to a step: the same engine and requests, with vLLM's sampler alone and with relaxation on.

    .venv/bin/python benchmarks/sampler.py [--dummy qwen3.5-35b-a3b] [--batches 1,64]

``threshold`` with eps 1 takes only drafts that are certain, so both sides emit the same tokens, and the difference is
the two kernels and their launches. Reported is the time per verify step, which a different acceptance would not change.
"""

import argparse
import itertools
import json
import sys

from engine_process import decoding_in_graphs, share_processors
from quiet import Machine
from record import paired_ratio, summary, write

from thor_spec.bench import dummy, facts, workload
from thor_spec.bench.load import repeat
from thor_spec.bench.turns import turns
from thor_spec.cli.starting import planned
from thor_spec.serve.client import Server
from thor_spec.sizes import parse_size
from thor_spec.vllm_plugin.seam import has_gpu_build

LIMIT = 1.02
SIDES = {
    "vllm": {"thor_spec": {"accept": "exact"}},
    "relaxed": {"thor_spec": {"accept": "threshold", "accept_eps": 1.0}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--dummy", default="qwen3.5-35b-a3b", help="dimensions; its drafter needs a GPU")
    parser.add_argument("--model", help="instead of --dummy")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--drafts", type=int, default=15 if has_gpu_build() else 7, help="tokens per step")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--kv-cache-memory", type=parse_size, help="of an engine beside others, e.g. 1GiB")
    options = parser.parse_args()
    batches = [int(each) for each in options.batches.split(",")]
    flags: dict[str, object] = {"context": options.context, "max_seqs": max(batches), "draft_tokens": options.drafts}
    if has_gpu_build():  # what is compiled is the same on both sides, and takes minutes; but steps are captured
        sizes = [requests * (options.drafts + 1) for requests in batches]
        flags["vllm_args"] = ("--compilation-config", json.dumps(decoding_in_graphs(sizes)))
    if options.model:
        flags["model"] = options.model
    else:
        target, drafter = (str(path) for path in dummy.make(options.dummy))
        flags |= {"model": target, "draft": drafter, "dummy_weights": True}
    source = planned({**flags, "kv_cache_memory": options.kv_cache_memory})

    share_processors()
    machine = Machine()

    @machine.alone()
    def work(server: Server) -> list[dict[str, object]]:
        known = {"options": vars(options), "limit": LIMIT, "facts": facts.of_server(server, source.plan)}
        cells: list[dict[str, object]] = []
        path = None  # written after each cell, so that a run that is cut short keeps what it has
        for batch in batches:
            cells.append(cell(server, batch, options))
            path = write("sampler", {**known, "cells": cells}, instead_of=path)
            print(f"batch {batch}: step time {cells[-1]['ratio']} of vLLM's own", flush=True)
        print(path)
        return cells

    if any(found["ratio"]["median"] > LIMIT for found in source.visit(work)):
        sys.exit(f"more than {LIMIT - 1:.0%} of a step")


def cell(server: Server, batch: int, options: argparse.Namespace) -> dict[str, object]:
    stored = workload.requests(("code", "chat", "agent"), context=server.context, tokens=options.tokens)
    requests = list(itertools.islice(itertools.cycle(stored), max(batch, len(stored))))
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    for i, name in turns(SIDES, options.repetitions + 1):  # the first one warms
        found = repeat(server, requests, batch=batch, said={"temperature": 0.7, **SIDES[name]})
        if i:
            seconds[name].append(found.seconds * min(batch, len(requests)) / found.drafts)
        print(f"batch {batch} {name}: {found.figures}", file=sys.stderr)
    return {
        "batch": batch,
        "step_ms": {name: summary([1000 * value for value in values]) for name, values in seconds.items()},
        "samples": seconds,
        "ratio": paired_ratio(seconds["relaxed"], seconds["vllm"]),
    }


if __name__ == "__main__":
    main()
