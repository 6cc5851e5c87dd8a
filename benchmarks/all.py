"""All that wants a GPU: what is not timed runs beside each other, engines start beside each other, and timing is alone.

    python benchmarks/all.py --out out/all                   # in the order of the list, as engines fit into the device
    python benchmarks/all.py --out out/all --only tree 'rope-*'
    python benchmarks/all.py --list

Each job leaves OUT/NAME with its records and OUT/NAME.log; OUT/state.json says how far all are. Fails when any failed.
``quiet.py`` sees to the order of measurements; another run of this script may be started beside one that goes on.
"""

import argparse
import fnmatch
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thor_spec.device import cuda

ROOT = Path(__file__).parent.parent
FACTORS = (1, 2, 4, 8)
POLL_S = 0.5


@dataclass(frozen=True)
class Job:
    """One script with its arguments. ``{out}`` stands for its folder, ``{corpus}`` for what texts are taken from."""

    name: str
    gib: int
    """What its engines take of the device, all together."""
    line: str
    runs: Literal["by itself", "beside"] = "by itself"
    """``beside`` others from first to last, or ``by itself``: it takes the lock of ``quiet.py`` when it measures."""


BESIDE, POLITE = "benchmarks/beside.py", "benchmarks/polite.py"
NANO = "nano-hybrid --kv-cache-memory 1GiB --out {out}"
STUDY = "benchmarks/rope_study.py --corpus {corpus} --parts ppl niah --samples 4 --needles 6 --choice --out {out}/study"
LARGE = "--dummy qwen3.5-35b-a3b --synthetic-acceptance 5.84 --context 49152 --kv-cache-memory 16GiB --out {out}"
DECODING_IN_GRAPHS = """--compilation-config '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'"""
ADAPTIVE = (
    "--arms fixed:draft_tokens=15 --arms fixed8:draft_tokens=15,batch=8 "
    "--arms adaptive:draft_tokens=15,adaptive_drafts=true "
    "--arms adaptive8:draft_tokens=15,adaptive_drafts=true,batch=8 --tokens 256 --repetitions 6 --per-start 3"
)
JOBS = (
    Job("verify-tree", 4, f"{POLITE} verify tree {NANO} --tree 8 --rows 1800 --plant"),
    Job(
        "verify-prefix-cache",
        4,
        f"{POLITE} verify prefix-cache {NANO} --conversations 100",
    ),
    *(Job(f"rope-study-{factor}x", 4, f"{BESIDE} {STUDY} --factors {factor}", "beside") for factor in FACTORS),
    Job(
        "acceptance",
        4,
        f"{BESIDE} benchmarks/acceptance.py --kv-cache-memory 1GiB --tokens 96 --quality-seeds 3 --out {{out}}/cells",
    ),
    Job(
        "agent",
        95,
        f"{POLITE} bench agent {LARGE} --arms off,dflash,both --sessions 1 --turns 5 --repetitions 5 "
        f"-- {DECODING_IN_GRAPHS}",
    ),
    Job(
        "adaptive",
        4,
        f"{POLITE} bench chat {NANO} --arms plain:draft=none --arms plain8:draft=none,batch=8 {ADAPTIVE}",
    ),
    Job("adaptive-large", 95, f"{POLITE} bench chat {LARGE} {ADAPTIVE} -- {DECODING_IN_GRAPHS}"),
    Job("tree", 20, "benchmarks/tree.py --prompts 8 --answer 192"),
    Job("diffusion", 12, "benchmarks/diffusion.py --prompts 50"),
    Job("diffusion-mini", 72, "benchmarks/diffusion.py --model mini --attention-backend TRITON_ATTN"),
    Job("sampler", 85, f"{BESIDE} benchmarks/sampler.py --kv-cache-memory 8GiB"),
    Job("rope-speed", 122, "benchmarks/rope_speed.py"),
    Job("tree-costs", 85, "benchmarks/tree.py --dummy --arms chain:15 tree:15 tree:auto --prompts 3 --answer 64"),
)


def main() -> None:
    options = parse()
    jobs = [job for job in JOBS if any(fnmatch.fnmatch(job.name, only) for only in options.only)]
    if not jobs:
        sys.exit(f"No job is called {' or '.join(options.only)}. --list says what there is.")
    if options.list:
        print("\n".join(f"{job.name:20} {job.gib:3} GiB  {job.line}" for job in jobs))
        return
    gpu = cuda.probe()
    room = options.gib or (gpu.total_bytes >> 30 if gpu else 0)
    sys.exit(1 if run(jobs, options.out.resolve(), room, options.corpus) else 0)


def run(jobs: list[Job], out: Path, room: int, corpus: str) -> list[str]:
    """Run all; return the names of those that failed."""
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    waiting, running = list(jobs), dict[Job, subprocess.Popen[bytes]]()
    state: dict[str, dict[str, float | str]] = {job.name: {"is": "waiting"} for job in jobs}
    while waiting or running:
        for job in list(waiting):
            # What is larger than the device is not what was thought, and had better say so itself.
            if not running or sum(other.gib for other in running) + job.gib <= room:
                waiting.remove(job)
                running[job] = start(job, out, corpus)
                state[job.name] = {"is": "running", "since_s": round(time.monotonic() - began)}
        for job, process in list(running.items()):
            if (code := process.poll()) is not None:
                del running[job]
                took = round(time.monotonic() - began - float(state[job.name]["since_s"]))
                state[job.name] |= {"is": "failed" if code else "done", "took_s": took}
                print(f"{job.name}: {state[job.name]['is']} after {took} s", flush=True)
        (out / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        time.sleep(POLL_S)
    return [name for name, of in state.items() if of["is"] == "failed"]


def start(job: Job, out: Path, corpus: str) -> "subprocess.Popen[bytes]":
    folder = out / job.name
    folder.mkdir(exist_ok=True)
    argv = [part.replace("{out}", str(folder)).replace("{corpus}", corpus) for part in shlex.split(job.line)]
    prefix = () if job.runs == "by itself" else ("benchmarks/quiet.py", job.runs)
    with (out / f"{job.name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *prefix, *argv],
            cwd=ROOT,
            env={**os.environ, "OUT": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/all"))
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN")
    parser.add_argument("--gib", type=int, help="memory to fill; default: the device's")
    parser.add_argument("--corpus", default="synthetic", help="of the study of rope types")
    parser.add_argument("--list", action="store_true", help="say what there is")
    return parser.parse_args()


if __name__ == "__main__":
    main()
