"""One recurrent state per sequence against one per draft position: what fits, and how fast it is, side by side.

    python benchmarks/state.py                                   # on an H200: the arms under load, 8 minutes at most
    python benchmarks/state.py --only capacity                   # other K and drafters: starts without requests
    python benchmarks/state.py --only mtp                        # three drafts by the target's own head
    python benchmarks/state.py --only 'reconstruct-wy *'         # one arm again
    python benchmarks/state.py --drafter-window 1024 --sequences 64 --batched-tokens 2048
    python benchmarks/state.py --tiny                            # on a CPU: does it run?

Dummy weights with the dimensions of Qwen3.5-35B-A3B; drafts are accepted by chance (``synthetic_acceptance_length``).
Each run is an engine in a process of its own. The record is written after every run, so that what is cut short keeps
what it has; a run that would not end within ``--minutes`` is not started, and one that fails leaves its log.
``--merge`` takes over the runs of an earlier record.
"""

import argparse
import fnmatch
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qwen35
from engine_process import decoding_in_graphs, run_again, runner_of, serve
from record import write

from thor_spec.vllm_plugin.options import NAME as PLUGIN

ARMS = {
    "snapshot": {"state": "snapshot"},
    "reconstruct": {"state": "reconstruct", "gdn_kernel": "replay"},
    "reconstruct-wy": {"state": "reconstruct", "gdn_kernel": "wy"},
    "none": None,
}
DRAFTERS = {  # layers, KV heads of 128, and the window over which all layers but the last slide
    "wide": (5, 8, None),  # the one of the published 9.91 sequences
    "window": (5, 4, 2048),  # as published for the 27B
    "narrow": (5, 2, 2048),  # about the least that a drafter's cache can be
    "mtp": None,  # the target's own head: one layer like the target's attention
}
UTILIZATIONS, SEATS = (0.6, 0.75, 0.9), (256, 64)
GOALS = {"sequences": 45.0, "sequences_ratio": 4.5, "load_tokens_per_s": 2.0, "load_ttft_p99": 4.0, "step_time": 1.0}


@dataclass(frozen=True)
class Run:
    """One engine."""

    group: str
    """``load`` and ``mtp``: requests are sent. ``capacity``: it only starts, without compilation and graphs."""
    arm: str
    drafts: int
    drafter: str = "wide"

    @property
    def name(self) -> str:
        return self.arm if self.arm == "none" else f"{self.arm} K={self.drafts} {self.drafter}"

    @property
    def stock(self) -> str:
        """What it is compared with."""
        return f"snapshot K={self.drafts} {self.drafter}"


RUNS = (
    *(Run("load", arm, 15) for arm in ("snapshot", "reconstruct", "reconstruct-wy")),
    Run("load", "none", 0),
    *(Run("mtp", arm, 3, "mtp") for arm in ("snapshot", "reconstruct", "reconstruct-wy")),  # the TreeWY paper's setting
    *(
        Run("capacity", arm, drafts, drafter)
        for drafts, drafter in ((15, "window"), (15, "narrow"), (3, "wide"), (7, "wide"))
        for arm in ("snapshot", "reconstruct")
    ),
)


def main() -> None:
    options = parse()
    if options.one is not None:
        serve(lambda _: measure(options, RUNS[options.one]))
    known: dict[str, Any] = json.loads(options.merge.read_text())["runs"] if options.merge else {}
    settings = {name: value for name, value in vars(options).items() if name not in ("one", "merge")}
    record: Path | None = None
    ends, longest = time.monotonic() + 60 * options.minutes, dict.fromkeys((run.group for run in RUNS), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(RUNS):
            if not any(fnmatch.fnmatch(part, only) for only in options.only for part in (run.name, run.group)):
                continue
            started = time.monotonic()
            if started + longest[run.group] > ends:
                known.setdefault(run.name, {"left_out": f"{options.minutes:g} minutes were over"})
            else:
                known[run.name] = in_a_process(run, number, Path(folder))
                longest[run.group] = max(longest[run.group], time.monotonic() - started)
            result = {"settings": settings, "runs": known, "against_stock": compared(known)}
            record = write("state", result, seeds={"sampling": 0}, instead_of=record)
            why = known[run.name].get("left_out") or known[run.name].get("failed") or "done"
            why = next((line for line in reversed(why.splitlines()) if "Error: " in line), why[:200])
            print(f"{run.name}: {why}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    print(record)
    print(table(known))
    print(targets(known, compared(known)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=["load"], metavar="GROUP|RUN", help="load, mtp, capacity, or a pattern"
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--utilization", type=float, default=0.75, help="gpu_memory_utilization")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--sequences", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--batched-tokens", type=int, help="max_num_batched_tokens")
    parser.add_argument("--drafter-window", type=int, metavar="N", help="of reconstruct, where no layer slides itself")
    parser.add_argument("--requests", type=int, default=256, help="sent at once")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each of them")
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--single", type=int, default=512, help="tokens answered to one request alone")
    parser.add_argument("--acceptance", type=float, default=5.84, help="tokens per step, where K allows")
    parser.add_argument("--repetitions", type=int, default=5, help="of the single request")
    parser.add_argument("--caching", action="store_true", help="prefix caching, in align mode")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument(
        "--compiled", action="store_true", help="as vLLM starts by itself; each start takes minutes more"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny-hybrid instead of the 35B, and little of everything")
    parser.add_argument("--merge", type=Path, help="record of an earlier command")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.context, options.sequences, options.requests, options.prompt, options.answer = 1024, 4, 6, 40, 8
        options.single, options.repetitions = 16, 2
    return options


def in_a_process(run: Run, number: int, folder: Path) -> dict[str, Any]:
    """Return what ``measure`` returns, from a process of its own, or how it failed."""
    try:
        found: dict[str, Any] = run_again(
            "--one", str(number), what=run.name, log=folder / f"{number}.log",
            environment={"VLLM_USE_FLASHINFER_SAMPLER": "0"},  # or the first start compiles it, 100 s
        )  # fmt: skip
        return found
    except SystemExit as failure:
        return {"failed": str(failure)}


def engine(options: argparse.Namespace, run: Run, folder: Path) -> Any:
    from vllm import LLM

    from thor_spec.vllm_plugin.seam import has_gpu_build

    gpu = has_gpu_build()
    speculation: dict[str, Any] | None = None
    if options.tiny:
        from thor_spec.nano import checkpoints

        target, draft = (str(checkpoints.ensure(name)) for name in ("tiny-hybrid", checkpoints.PAIRS["tiny-hybrid"]))
        run = Run(run.group, run.arm, min(run.drafts, 7))
    else:
        target, draft = str(folder / "target"), str(folder / "drafter")
        configurations = {target: qwen35.target()}
        if (shape := DRAFTERS[run.drafter]) is not None:
            configurations[draft] = qwen35.drafter(*shape)
        for path, config in configurations.items():
            Path(path).mkdir()
            (Path(path) / "config.json").write_text(json.dumps(config))
    if run.drafts:
        speculation = {
            **({"method": "mtp"} if run.drafter == "mtp" else {"method": "dflash", "model": draft}),
            "num_speculative_tokens": run.drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": min(options.acceptance, 0.8 * run.drafts + 1),
        }
    ours: dict[str, Any] = {**({} if gpu else {"runner_kernels": "torch"}), **(ARMS[run.arm] or {})}
    if options.drafter_window and run.arm.startswith("reconstruct") and (shape := DRAFTERS[run.drafter]):
        ours |= {} if shape[2] else {"drafter_window": options.drafter_window}
    if not gpu:
        ours.pop("gdn_kernel", None)  # interpreted kernels would take hours
    return LLM(
        target,
        max_model_len=options.context,
        max_num_seqs=options.sequences,
        max_num_batched_tokens=options.batched_tokens,
        skip_tokenizer_init=True,
        enable_prefix_caching=options.caching,
        disable_log_stats=False,
        tensor_parallel_size=options.tp,
        seed=0,
        speculative_config=speculation,
        additional_config={PLUGIN: ours, **({"gdn_prefill_backend": "triton"} if gpu else {})},
        **({} if options.tiny else {"load_format": "dummy", "mamba_ssm_cache_dtype": "float32"}),
        **({"gpu_memory_utilization": options.utilization} if gpu else {"kv_cache_memory_bytes": 256 << 20}),
        **graphs(options, run, gpu=gpu),
    )


def graphs(options: argparse.Namespace, run: Run, *, gpu: bool) -> dict[str, Any]:
    """Return how a start spends its time: nothing is compiled, and decode steps of up to 512 tokens are captured."""
    if not gpu or run.group == "capacity":
        return {"enforce_eager": True}
    if options.compiled:
        return {}
    sizes = [n * (run.drafts + 1) for n in (2**power for power in range(10)) if n <= options.sequences]
    captured = [size for size in sizes if size <= 512]
    return {"compilation_config": decoding_in_graphs(captured)}


def measure(options: argparse.Namespace, run: Run) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        llm = engine(options, run, Path(folder))
        found = {"start_s": round(time.time() - started, 1), **capacity(llm, options)}
        if run.group == "capacity":
            return found
        generate(llm, 1, 64, 16, seed=99)  # warms what only a real step compiles: alone, and prompts beside decodes
        generate(llm, min(options.requests, 16), options.prompt, 16, seed=98)
        singles = [generate(llm, 1, 128, options.single, seed=i) for i in range(options.repetitions)]
        found["single"] = {
            "tokens_per_s": round(statistics.median(single["tokens_per_s"] for single in singles), 2),
            "step_ms": round(statistics.median(single["step_ms"] for single in singles), 4),
            "runs": singles,
        }
        found["load"] = generate(llm, options.requests, options.prompt, options.answer, seed=7)
    return found


def capacity(llm: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return how many sequences of full length fit, as vLLM counts them, here and with other shares of the memory.

    What fits is proportional to the bytes that vLLM found for the cache. Those grow by the share of the whole memory,
    and by the scratch of places that are not reserved; that smaller batches also sample less is not counted.
    """
    import torch
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    core = llm.llm_engine.engine_core.engine_core
    cache = core.scheduler.kv_cache_config
    fit = get_max_concurrency_for_kv_cache_config(core.vllm_config, cache)
    available = int(core.available_gpu_memory_for_kv_cache)
    whole = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 2 * available
    steps = getattr(runner_of(llm).model_state, "steps", None)
    place = steps.scratch_bytes / options.sequences if steps is not None else 0.0
    elsewhere = {
        f"{share:g}, {seats} places": round(
            fit
            * max(0.0, available + (share - options.utilization) * whole + (options.sequences - seats) * place)
            / available,
            2,
        )
        for share in UTILIZATIONS
        for seats in SEATS
    }
    return {
        "sequences": round(fit, 2),
        "tokens": int(fit * core.vllm_config.model_config.max_model_len),
        "blocks": cache.num_blocks,
        "groups": len(cache.kv_cache_groups),
        "cache_bytes": available,
        "scratch_bytes": steps.scratch_bytes if steps is not None else 0,
        "sequences_at": elsewhere,
    }


def generate(llm: Any, requests: int, prompt: int, answer: int, *, seed: int) -> dict[str, Any]:
    """Send ``requests`` at once; return throughput, time per step, and what users wait for."""
    import random

    from vllm import SamplingParams

    rng = random.Random(seed)
    prompts = [{"prompt_token_ids": [rng.randrange(256) for _ in range(prompt)]} for _ in range(requests)]
    params = [
        SamplingParams(temperature=0.7, seed=i, max_tokens=answer, ignore_eos=True, detokenize=False)
        for i in range(requests)
    ]
    before = steps(llm)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    first = sorted(output.metrics.first_token_latency for output in outputs)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    drafted = steps(llm) - before or tokens  # without drafts a step of a request is a token
    decoding = seconds - first[0] if requests == 1 else seconds
    return {
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "step_ms": round(1e3 * decoding / max(drafted / requests, 1), 4),
        "tokens_per_step": round(tokens / drafted, 3),
        "ttft_p50_s": round(first[len(first) // 2], 3),
        "ttft_p99_s": round(first[min(len(first) - 1, int(0.99 * len(first)))], 3),
    }


def steps(llm: Any) -> int:
    """Return the verified steps of all requests so far."""
    return int(sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_drafts"))


def compared(known: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return every run against snapshot with the same drafts: sequences, tokens per second, TTFT, and time per step."""
    found = {}
    for run in RUNS:
        ours, stock = known.get(run.name, {}), known.get(run.stock, {})
        if run.arm == "snapshot" or "sequences" not in ours or "sequences" not in stock:
            continue
        found[run.name] = {"sequences_ratio": round(ours["sequences"] / stock["sequences"], 3)}
        if "load" in ours and "load" in stock:
            found[run.name] |= {
                "load_tokens_per_s": round(ours["load"]["tokens_per_s"] / stock["load"]["tokens_per_s"], 3),
                "load_ttft_p99": round(stock["load"]["ttft_p99_s"] / ours["load"]["ttft_p99_s"], 3),
                "step_time": round(ours["single"]["step_ms"] / stock["single"]["step_ms"], 4),
            }
    return found


def table(known: dict[str, Any]) -> str:
    lines = [f"{'':28} {'fit':>7} {'b1 ms':>8} {'b1 tok/s':>9} {'load tok/s':>11} {'p99 TTFT':>9}  fits elsewhere"]
    for name, run in known.items():
        if "sequences" not in run:
            lines.append(f"{name:28} {next(iter(run))}")
            continue
        single, load = run.get("single", {}), run.get("load", {})
        lines.append(
            f"{name:28} {run['sequences']:7.2f} {single.get('step_ms', 0):8.3f} {single.get('tokens_per_s', 0):9.1f} "
            f"{load.get('tokens_per_s', 0):11.1f} {load.get('ttft_p99_s', 0):9.2f}  "
            + "  ".join(f"{at}: {fit}" for at, fit in run["sequences_at"].items())
        )
    return "\n".join(lines)


def targets(known: dict[str, Any], against: dict[str, dict[str, float]]) -> str:
    """Return what the project aims at, line by line, for the runs that have it."""
    lines = [f"{'':28} {'what':18} {'goal':>8} {'found':>8}"]
    for name, ratios in against.items():
        for what, found in {"sequences": known[name]["sequences"], **ratios}.items():
            least = what != "step_time"
            met = found >= GOALS[what] if least else found <= GOALS[what]
            goal = f"{'>=' if least else '<='} {GOALS[what]:g}"
            lines.append(f"{name:28} {what:18} {goal:>8} {found:8.2f} {'met' if met else 'missed'}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
