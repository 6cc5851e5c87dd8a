"""GDN verify and commit against vLLM's snapshot kernel and against copying the states once.

    python benchmarks/kernels.py [--only REGEX] [--budget-s 480] [--sweep] [--smoke]

A correctness gate runs first; if it is red no time is reported. All ways of a case are captured as CUDA graphs over the
same inputs and replayed in turns, A B C C B A ...; a graph holds as many layers as it takes to exceed the L2 cache, and
times are per layer. What the budget leaves out is listed. ``--sweep`` also times other launch geometries, to revise
the tables in ``tiles.py``. ``--smoke`` runs everything on the CPU, interpreted and tiny; its times mean nothing.
"""

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

if "--smoke" in sys.argv:  # before anything imports Triton
    from thor_spec.vllm_plugin import interpreter

    os.environ.update(interpreter.environment(os.environ.get("PYTHONPATH", "")))
    sys.path.insert(0, str(interpreter.PATH))

import torch

from benchmarks import upstream
from benchmarks.kernel_layers import Dims, Launch, Layer, Shape, best_first, chain, full, traffic
from benchmarks.record import paired_ratio, summary, write
from tests.kernels import cases, vllm_kernel
from tests.kernels.checks import Variant, check_commit, check_verify
from thor_spec.kernels.gdn_verify.tiles import Tiles

BATCHES = (1, 8, 64, 4, 16)
SHAPES = {
    "chain 16": chain(16), "ddtree 64": best_first(63), "chain 8": chain(8), "chain 4": chain(4), "chain 32": chain(32),
    "chain 64": chain(64), "full 2,2,2": full(2, 2, 2), "full 3,3,3": full(3, 3, 3), "ddtree 16": best_first(15),
    "ddtree 32": best_first(31),
}  # fmt: skip
L2_BYTES = 192 << 20  # three times an H200's; Thor's is smaller
WAYS: dict[str, tuple[Variant, int | None]] = {
    "replay, commit": ("replay", None), "replay, fused": ("replay", 1), "replay, not due": ("replay", 32),
    "wy, commit": ("wy", None), "wy, fused": ("wy", 1), "wy, not due": ("wy", 32),
}  # fmt: skip
SWEEP: dict[str, tuple[Variant, list[Tiles]]] = {
    "replay": ("replay", [Tiles(block_v=bv, warps=4) for bv in (8, 16, 32)]),
    "wy": (
        "wy",
        [
            Tiles(block_v=bv, warps=w, registers=r)
            for bv, w, r in (
                (16, 2, None),
                (32, 4, None),
                (32, 2, None),
                (64, 4, None),
                (64, 4, 168),
                (64, 4, 128),
                (128, 8, None),
            )
        ],
    ),
}
SPLITS = [Tiles(block_v=bv, warps=4, walkers=w) for bv in (8, 16, 32) for w in (2, 4, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name (as 'batch 8, chain 16') matches this")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=480, help="start no case after this many seconds")
    parser.add_argument("--gate-cases", type=int, default=1000, help="random cases of bit-identity with vLLM")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    device = "cpu" if options.smoke else "cuda"
    snapshot, origin = upstream.load()
    print(f"vLLM's kernel: {origin}", file=sys.stderr)
    gate = run_gate(device, snapshot, 2 if options.smoke else options.gate_cases)
    if gate["red"]:
        print(f"The gate is red, so no times: {gate['red']}")
        raise SystemExit(1)
    dims = Dims(1, 2, 16, 16) if options.smoke else Dims()
    wanted = [Shape(batch, name, parents) for batch in BATCHES for name, parents in SHAPES.items()]
    if options.smoke:
        wanted = [Shape(1, "chain 4", chain(4)), Shape(2, "full 2,2", full(2, 2))]
    rows, left_out = [], []
    for shape in wanted:
        label = f"batch {shape.requests}, {shape.name}"
        if not re.search(options.only, label):
            continue
        if time.monotonic() - began > options.budget_s:
            left_out.append(label)
            continue
        row = run_case(dims, shape, device, snapshot, options.repetitions if not options.smoke else 2, options.sweep)
        rows.append({"case": label, "nodes": shape.nodes, "accepted": len(shape.accepted), **row})
        print(f"{time.monotonic() - began:4.0f} s  {label}", file=sys.stderr, flush=True)
    result = {
        "smoke": options.smoke, "dims": vars(dims), "vllm_kernel": origin, "gate": gate, "cases": rows,
        "left_out": left_out, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, interpreted",
        "copy_bandwidth_gb_s": bandwidth(dims, rows), "torch": torch.__version__,
    }  # fmt: skip
    path = write("kernels-smoke" if options.smoke else "kernels", result, seeds={"inputs": 0})
    print(table(rows))
    if left_out:
        print("left out for the budget: " + "; ".join(left_out))
    print(f"gate: {gate['checks']} checks, {gate['identical']} random cases bit-identical to vLLM's kernel ({origin})")
    print(path)


def run_gate(device: str, snapshot: Any, count: int) -> dict[str, Any]:
    """Return what was checked, and in ``red`` the first failure."""
    sizes = {"heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128} if device == "cuda" else {}
    gate: dict[str, Any] = {"checks": 0, "identical": 0, "red": ""}
    try:
        for variant in ("replay", "wy"):
            for parents in ([cases.chain(16)], [cases.random_tree(40, 1), cases.star(3)]):
                check_verify(cases.make(parents, **sizes), variant, device)
                check_commit(cases.make(parents, **sizes), variant, device)
                gate["checks"] += 2
        for seed in range(count if snapshot else 0):
            case, leaves, tiles = vllm_kernel.random_case(seed)
            vllm_kernel.same_as_snapshots(snapshot, case.to(device), leaves, tiles=tiles)
            gate["identical"] += 1
    except AssertionError as error:
        gate["red"] = f"after {gate['checks']} checks and {gate['identical']} identical cases: {error}"
    return gate


def run_case(dims: Dims, shape: Shape, device: str, snapshot: Any, repetitions: int, sweep: bool) -> dict[str, Any]:
    """Return microseconds per layer of each way, and the bytes that go with them."""
    copies = 1 if device == "cpu" else max(2, min(96, -(-L2_BYTES // (shape.requests * dims.state_bytes))))
    layers = [Layer(dims, shape, device, seed) for seed in range(copies)]
    ways: dict[str, list[Launch]] = {"copy": [layer.copy() for layer in layers]}
    if snapshot:
        ways["vllm"] = [layer.upstream(snapshot) for layer in layers]
    for name, (variant, period) in WAYS.items():
        ways[name] = [layer.ours(variant, period) for layer in layers]
    if sweep:
        for name, (variant, geometries) in SWEEP.items():
            for tiles in geometries + (SPLITS if name == "replay" and not shape.is_chain else []):
                period = 1 if tiles.walkers == 1 else None
                label = f"{name}, {tiles}"
                ways[label] = [layer.ours(variant, period, tiles) for layer in layers]
    samples = timed(ways, repetitions, device)
    result: dict[str, Any] = {
        "layers": copies,
        "us": {name: summary(values) for name, values in samples.items()},
        "bytes": traffic(dims, shape),
    }
    if snapshot:
        result["over_vllm"] = {
            name: paired_ratio(values, samples["vllm"]) for name, values in samples.items() if name != "vllm"
        }
    return result


def timed(ways: dict[str, list[Launch]], repetitions: int, device: str) -> dict[str, list[float]]:
    """Return microseconds per layer, one value per repetition, the ways taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    if device == "cpu":
        for _ in range(repetitions):
            for name, launches in ways.items():
                start = time.perf_counter()
                for launch in launches:
                    launch()
                samples[name].append((time.perf_counter() - start) * 1e6 / len(launches))
        return samples
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, launches in ways.items():
        for launch in launches[:1]:  # compiles
            launch()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for launch in launches:
                launch()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once(graph: torch.cuda.CUDAGraph, replays: int) -> float:
        first.record()
        for _ in range(replays):
            graph.replay()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / replays

    replays = {}
    for name, graph in graphs.items():
        once(graph, 3)
        replays[name] = max(3, min(200, int(8000 / once(graph, 3))))  # about 8 ms at a time
    for i in range(repetitions):
        for name in list(graphs) if i % 2 == 0 else list(reversed(graphs)):
            samples[name].append(once(graphs[name], replays[name]) / len(ways[name]))
    return samples


def bandwidth(dims: Dims, rows: list[dict[str, Any]]) -> float | None:
    """Return the best copy bandwidth seen, reads and writes counted."""
    seen = [
        2 * int(match[1]) * dims.state_bytes / row["us"]["copy"]["median"] / 1e3
        for row in rows
        if (match := re.match(r"batch (\d+)", row["case"]))
    ]
    return round(max(seen), 1) if seen else None


def table(rows: list[dict[str, Any]]) -> str:
    """Return medians in microseconds, the best way's share of vLLM's time, and memory held per request."""
    names = ["copy", "vllm", *WAYS]
    lines = ["| case | " + " | ".join(names) + " | best / vllm | spread | held, vllm/ours |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for row in rows:
        us = row["us"]
        cells = [f"{us[name]['median']:.1f}" if name in us else "-" for name in names]
        ours = {name: us[name]["median"] for name in ("replay, commit", "replay, fused", "wy, commit", "wy, fused")}
        best = min(ours, key=lambda name: ours[name])
        ratio = f"{row['over_vllm'][best]['median']:.3f} ({best})" if "over_vllm" in row else f"- ({best})"
        spread = max((v["max"] - v["min"]) / v["median"] for v in us.values())
        held = row["bytes"]["vllm_held"] / row["bytes"]["fused_held" if "fused" in best else "commit_held"]
        lines.append(f"| {row['case']} | " + " | ".join(cells) + f" | {ratio} | {spread:.1%} | {held:.0f}x |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
