"""Tokens per step of nano-hybrid with nano-dflash, measured by vLLM on held-out prompts, and a record of it.

    python benchmarks/nano.py --target out/nano-hybrid --drafter out/nano-dflash --data .gpu/nano

For no drafts, K = 7, K = 15, and windows of the drafter (``--windows``, at the largest K), one engine each, in its own
process: every kind of prompt at temperature 0 and 0.7. The record has τ (emitted tokens per step of the target), the
share of steps that accepted at least n drafts, and tokens per second; greedy tokens with drafts are compared with those
without, and the first differences listed.
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine_process import run_again, serve
from record import write

from thor_spec.vllm_plugin.options import NAME as PLUGIN

TEMPERATURES = (0.0, 0.7)
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
DRAFTS = "vllm:spec_decode_num_drafts"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def main() -> None:
    options = parse()
    if options.one is not None:
        serve(lambda _: measure(options, *options.one))
    prompts = read_prompts(options)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.gpus) as pool:
        arms = [(0, 0), *((drafts, 0) for drafts in options.drafts)]
        arms += [(max(options.drafts), window) for window in options.windows]
        found = pool.map(lambda i: in_a_process(arms[i], Path(folder), str(i % options.gpus)), range(len(arms)))
        runs = {called(*arm): run for arm, run in zip(arms, found, strict=True)}
    result: dict[str, Any] = {
        "target": options.target.name,
        "drafter": options.drafter.name,
        "new_tokens": options.new,
        "eager": options.eager,
        "prompts": {kind: len(rows) for kind, rows in prompts.items()},
        "runs": {
            arm: {
                kind: {key: value for key, value in figures.items() if key != "tokens"} for kind, figures in run.items()
            }
            for arm, run in runs.items()
        },
        "greedy_differences": {arm: differences(runs[called(0, 0)], run) for arm, run in list(runs.items())[1:]},
    }
    print(json.dumps({arm: tau_table(run) for arm, run in result["runs"].items()}, indent=1))
    print(json.dumps(result["greedy_differences"]))
    print(write("nano", result, seeds={"sampling": options.seed}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of prompts.json")
    parser.add_argument("--drafts", type=int, nargs="*", default=[7, 15])
    parser.add_argument("--windows", type=int, nargs="*", default=[], help="last tokens that the drafter attends to")
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=64, help="of each kind")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=1, help="engines that run at once, each on a GPU of its own")
    parser.add_argument("--eager", action="store_true", help="no compilation and no graphs: a quick start, slow steps")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def read_prompts(options: argparse.Namespace) -> dict[str, list[list[int]]]:
    prompts: dict[str, list[list[int]]] = json.loads((options.data / "prompts.json").read_text())
    return {kind: rows[: options.prompts] for kind, rows in prompts.items()}


def called(drafts: int, window: int) -> str:
    """Return what an arm is called; a window of 0 is none."""
    if not drafts:
        return "no drafts"
    return f"K={drafts}, window {window}" if window else f"K={drafts}"


def in_a_process(arm: tuple[int, int], folder: Path, gpu: str) -> dict[str, Any]:
    """Return what ``measure`` returns, from a process of its own, on the GPU of that number."""
    found: dict[str, Any] = run_again(
        "--one", *map(str, arm), what=f"the engine with {called(*arm)}", log=folder / f"{arm}.log",
        environment={"CUDA_VISIBLE_DEVICES": gpu},
    )  # fmt: skip
    return found


def measure(options: argparse.Namespace, drafts: int, window: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from thor_spec.vllm_plugin.seam import has_gpu_build

    speculation = {"method": "dflash", "model": str(options.drafter), "num_speculative_tokens": drafts}
    gpu = has_gpu_build()
    ours: dict[str, Any] = {"drafter_window": window} if window else {}
    additional: dict[str, Any] = {PLUGIN: ours if gpu else {**ours, "runner_kernels": "torch"}}
    if gpu:
        additional["gdn_prefill_backend"] = "triton"
    engine = LLM(
        str(options.target),
        speculative_config=speculation if drafts else None,
        additional_config=additional,
        disable_log_stats=False,
        enable_prefix_caching=False,
        max_model_len=2048,
        max_num_seqs=options.batch,
        seed=options.seed,
        enforce_eager=options.eager or not gpu,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 30,
    )
    found = {}
    for kind, rows in read_prompts(options).items():
        inputs = [TokensPrompt(prompt_token_ids=row) for row in rows]
        for temperature in TEMPERATURES:
            parameters = SamplingParams(
                temperature=temperature, max_tokens=options.new, ignore_eos=True, seed=options.seed
            )
            if gpu:  # what is compiled on first use is not measured
                engine.generate(inputs[:2], parameters, use_tqdm=False)
            before, began = counters(engine), time.monotonic()
            outputs = engine.generate(inputs, parameters, use_tqdm=False)
            seconds = time.monotonic() - began
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            entry: dict[str, Any] = {
                "emitted": sum(map(len, tokens)),
                "seconds": round(seconds, 3),
                "tokens_per_second": round(sum(map(len, tokens)) / seconds, 1),
            }
            if drafts:
                entry |= acceptance(before, counters(engine))
            if temperature == 0:
                entry["tokens"] = tokens
            found[f"{kind}, T={temperature:g}"] = entry
    return found


def counters(engine: Any) -> dict[str, Any]:
    names = (ACCEPTED, DRAFTS, PER_POSITION)
    return {
        metric.name: getattr(metric, "values", None) or getattr(metric, "value", 0)
        for metric in engine.get_metrics()
        if metric.name in names
    }


def acceptance(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return τ and the share of steps with at least n accepted drafts."""
    steps = after[DRAFTS] - before.get(DRAFTS, 0)
    earlier = before.get(PER_POSITION) or [0] * len(after[PER_POSITION])
    reached = [now - then for now, then in zip(after[PER_POSITION], earlier, strict=True)]
    return {
        "steps": steps,
        "tau": round(1 + (after[ACCEPTED] - before.get(ACCEPTED, 0)) / max(steps, 1), 4),
        "at_least": [round(count / max(steps, 1), 4) for count in reached],
    }


def differences(plain: dict[str, Any], drafted: dict[str, Any]) -> dict[str, Any]:
    """Return, by kind, how many greedy answers differ and where the first difference of each lies."""
    found = {}
    for name, run in plain.items():
        if "tokens" in run:
            places = [
                next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
                for one, other in zip(run["tokens"], drafted[name]["tokens"], strict=True)
            ]
            found[name] = {"of": len(places), "first": [place for place in places if place is not None]}
    return found


def tau_table(run: dict[str, Any]) -> dict[str, Any]:
    return {name: entry.get("tau", entry["tokens_per_second"]) for name, entry in run.items()}


if __name__ == "__main__":
    main()
