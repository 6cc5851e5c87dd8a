"""What relaxed acceptance brings and costs: exact, threshold and typical at three temperatures, one and eight at once.

    .venv/bin/python benchmarks/acceptance.py [MODEL] [--out DIR] [--tokens 128] [--repetitions 5]

One server for all of it; a record for each temperature and batch, quality with the first batch, and one page and table
over them. The model is the shipped nano pair; where it is not shipped the untrained tiny pair takes its place, and is
named.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from engine_process import share_processors
from quiet import Machine

from thor_spec import record
from thor_spec.bench import chat, report
from thor_spec.bench.arms import parse
from thor_spec.cli.starting import planned
from thor_spec.config import DEFAULT_MODEL
from thor_spec.gates.judging import Running
from thor_spec.nano import shipped
from thor_spec.serve.client import Server
from thor_spec.sizes import parse_size

RULES = ("exact", "threshold:accept=threshold", "typical:accept=typical")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model", nargs="?", default=shipped.default_model(DEFAULT_MODEL))
    parser.add_argument("--out", type=Path, default=Path("evidence/acceptance"))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--temperatures", default="0.3,0.7,1.0")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--kinds", default="code,chat,document,agent")
    parser.add_argument("--context", type=int)
    parser.add_argument("--quality-seeds", type=int, default=4)
    parser.add_argument("--kv-cache-memory", type=parse_size, help="of an engine beside others, e.g. 1GiB")
    options = parser.parse_args()
    print(f"model {options.model}, drafter {shipped.drafter_of(options.model) or 'its own'}", file=sys.stderr)
    cells = [(float(t), int(b)) for t in options.temperatures.split(",") for b in options.batches.split(",")]
    folders = {cell: options.out / f"t{cell[0]:g}-b{cell[1]}" for cell in cells}
    for folder in folders.values():
        record.reserve(folder)
    asked = chat.Options(
        repetitions=options.repetitions,
        tokens=options.tokens,
        kinds=tuple(options.kinds.split(",")),
        quality_seeds=options.quality_seeds,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )

    share_processors()
    machine = Machine()

    @machine.alone()
    def work(server: Server) -> None:
        for temperature, batch in cells:
            arms = parse(RULES, {"url": server.url, "temperature": temperature, "batch": batch})
            # Answers are judged four at a time, whatever the batch: once for each temperature.
            here = replace(asked, quality=batch == cells[0][1])
            outcome = chat.run(arms, lambda arm: Running(str(arm.options["url"])), here)
            cell = {"model": server.model, "temperature": temperature, "batch": batch, **outcome.as_dict()}
            record.write("bench-chat", cell, folder=folders[temperature, batch], seeds={"requests": 1000})

    flags = {
        "model": options.model,
        "context": options.context,
        "kv_cache_memory": options.kv_cache_memory,
        "vllm_args": ("--max-logprobs", "-1", "--no-enable-prefix-caching"),
    }
    planned(flags).visit(work)
    records = record.find(options.out)
    print(report.markdown(records))
    (options.out / "report.html").write_text(report.html(records), encoding="utf-8")


if __name__ == "__main__":
    main()
