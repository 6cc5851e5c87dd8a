"""GDN verify and commit against vLLM's snapshot kernel and against copying the states once.

    python benchmarks/kernels.py [--only REGEX] [--budget-s 480] [--sweep] [--smoke]

A correctness gate runs first; if it is red no time is reported. All ways of a case are captured as CUDA graphs over the
same inputs and replayed in turns, A B C C B A ...; a graph holds as many layers as it takes to exceed the L2 cache, and
times are per layer. What the budget leaves out is listed. ``--sweep`` also times other launch geometries and those of
tree attention, to revise the tables in ``tiles.py``. ``--smoke`` runs everything on the CPU, interpreted and tiny; its
times mean nothing. At the end: one line per target, with what was measured and whether it is reached.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

if "--smoke" in sys.argv:  # before anything imports Triton
    from thor_spec.vllm_plugin import interpreter

    os.environ.update(interpreter.environment(os.environ.get("PYTHONPATH", "")))
    sys.path.insert(0, str(interpreter.PATH))

import torch

from benchmarks import kernel_attention, kernel_targets, upstream
from benchmarks.graph_times import L2_BYTES, timed
from benchmarks.kernel_layers import Dims, Launch, Layer, Shape, best_first, chain, full, traffic
from benchmarks.kernel_targets import Row
from benchmarks.path_layers import Dims as PathDims
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
WAYS: dict[str, tuple[Variant, int | None]] = {
    "replay, commit": ("replay", None), "replay, fused": ("replay", 1), "replay, not due": ("replay", 32),
    "wy, commit": ("wy", None), "wy, fused": ("wy", 1), "wy, not due": ("wy", 32),
}  # fmt: skip
VARIANTS: tuple[Variant, ...] = ("replay", "wy")
PERIODS = (8, 16, 32)
SWEEP = [
    *(Tiles(block_v=64, warps=4, parts=parts, tf32=tf32) for parts in (3, 2) for tf32 in (False, True)),
    Tiles(block_v=64, warps=4, registers=168),
    *(Tiles(block_v=64, warps=4, parts=2, solve_warps=warps) for warps in (2, 4)),
    *(Tiles(block_v=64, warps=4, parts=2, registers=registers) for registers in (128, 144)),
    *(Tiles(block_v=block_v, warps=warps, parts=2) for block_v, warps in ((32, 2), (64, 8), (128, 8))),
]
"""Other geometries of wy: products and parts; three programs on a multiprocessor by force; warps of the solution other
than the table's; with two parts, four programs by force, and other rows. Replay's geometry belongs to its bits."""
WALKERS = (2, 4, 8)
Job = tuple[str, str, Callable[[], Row]]


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
    gate = run_gate(device, snapshot, 2 if options.smoke else options.gate_cases, options.sweep)
    if gate["red"]:
        print(f"The gate is red, so no times: {gate['red']}")
        raise SystemExit(1)
    dims = Dims(1, 2, 16, 16) if options.smoke else Dims()
    rows: dict[str, list[Row]] = {"cases": [], "deferrals": [], "attention": []}
    left_out = []
    for kind, label, job in jobs(dims, device, snapshot, 2 if options.smoke else options.repetitions, options):
        if not re.search(options.only, label):
            continue
        if time.monotonic() - began > options.budget_s:
            left_out.append(label)
            continue
        rows[kind].append({"case": label, **job()})
        print(f"{time.monotonic() - began:4.0f} s  {label}", file=sys.stderr, flush=True)
    reached = kernel_targets.targets(rows["cases"], rows["deferrals"], gate)
    result = {
        "smoke": options.smoke, "dims": vars(dims), "vllm_kernel": origin, "gate": gate, **rows, "targets": reached,
        "left_out": left_out, "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, interpreted",
        "copy_bandwidth_gb_s": bandwidth(dims, rows["cases"]), "torch": torch.__version__,
    }  # fmt: skip
    path = write("kernels-smoke" if options.smoke else "kernels", result, seeds={"inputs": 0})
    print(table(rows["cases"]))
    for row in rows["cases"] if options.sweep else []:
        print(row["case"] + ": " + "; ".join(f"{us['median']:.1f} us {way}" for way, us in row["us"].items()))
    print(deferral_table(rows["deferrals"]))
    print(kernel_attention.table(rows["attention"]))
    if left_out:
        print("left out for the budget: " + "; ".join(left_out))
    print(f"gate: {gate['checks']} checks, {gate['identical']} random cases bit-identical to vLLM's kernel ({origin})")
    print(kernel_targets.table(reached))
    print(path)


def jobs(dims: Dims, device: str, snapshot: Any, repetitions: int, options: argparse.Namespace) -> list[Job]:
    """Return kind, name and work of every case: first those that the targets are about."""

    def case(shape: Shape) -> Job:
        label = f"batch {shape.requests}, {shape.name}"
        return "cases", label, lambda: run_case(dims, shape, device, snapshot, repetitions, options.sweep)

    def deferral(batch: int, n: int) -> Job:
        shape = Shape(batch, f"chain {n}", chain(n))
        label = f"deferral, batch {batch}, {shape.name}"
        return "deferrals", label, lambda: run_deferral(dims, shape, device, snapshot, repetitions)

    def attention(path_dims: PathDims, context: int, batch: int, name: str, sms: int) -> Job:
        label = f"attention, batch {batch}, {name}, context {context}"
        work = kernel_attention.attention_case
        return "attention", label, lambda: work(path_dims, batch, name, context, device, sms, repetitions)

    if options.smoke:
        tiny = PathDims(channels=64, heads=4, kv_heads=2, head_dim=32, block_size=48, full_layers=2)
        sweep = [attention(tiny, 70, 2, "chain 16", 4)] if options.sweep else []
        return [case(Shape(1, "chain 4", chain(4))), case(Shape(2, "full 2,2", full(2, 2))), deferral(1, 2), *sweep]
    first = [(1, "chain 16"), (8, "chain 16"), (64, "chain 16"), (8, "ddtree 64"), (16, "chain 16")]
    rest = [(batch, name) for batch in BATCHES for name in SHAPES if (batch, name) not in first]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return [
        *(case(Shape(batch, name, SHAPES[name])) for batch, name in first),
        *(deferral(batch, n) for n in (16, 2, 4, 8) for batch in (1, 8, 64)),
        *(attention(PathDims(), *which, sms) for which in kernel_attention.CASES if options.sweep),
        *(case(Shape(batch, name, SHAPES[name])) for batch, name in rest),
    ]


def run_gate(device: str, snapshot: Any, count: int, sweep: bool) -> Row:
    """Return what was checked, candidates of a sweep included, and in ``red`` the first failure."""
    sizes = {"heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128} if device == "cuda" else {}
    gate: Row = {"checks": 0, "identical": 0, "red": ""}
    try:
        for variant in ("replay", "wy"):
            for parents in ([cases.chain(16)], [cases.random_tree(40, 1), cases.star(3)]):
                check_verify(cases.make(parents, **sizes), variant, device)
                check_commit(cases.make(parents, **sizes), variant, device)
                gate["checks"] += 2
                for tiles in SWEEP if sweep and variant == "wy" else ():
                    check_verify(cases.make(parents, **sizes), variant, device, tiles=tiles)
                    gate["checks"] += 1
        for seed in range(count if snapshot else 0):
            case, leaves, tiles = vllm_kernel.random_case(seed)
            vllm_kernel.same_as_snapshots(snapshot, case.to(device), leaves, tiles=tiles)
            gate["identical"] += 1
    except AssertionError as error:
        gate["red"] = f"after {gate['checks']} checks and {gate['identical']} identical cases: {error}"
    return gate


def run_case(dims: Dims, shape: Shape, device: str, snapshot: Any, repetitions: int, sweep: bool) -> Row:
    """Return microseconds per layer of each way, and the bytes that go with them."""
    layers = make_layers(dims, shape, device)
    ways = common_ways(layers, snapshot)
    for name, (variant, period) in WAYS.items():
        ways[name] = [layer.ours(variant, period) for layer in layers]
    if sweep:
        for warps in (None, 2, 4):
            solution = Tiles(block_v=64, warps=4, solve_warps=warps)
            ways[f"wy, solution alone, {warps or 'default'} warps"] = [layer.solution(solution) for layer in layers]
        for tiles in SWEEP:
            ways[f"wy, fused, {tiles}"] = [layer.ours("wy", 1, tiles) for layer in layers]
        for walkers in () if shape.is_chain else WALKERS:
            tiles = Tiles(block_v=32, warps=4, walkers=walkers)
            ways[f"replay, commit, {tiles}"] = [layer.ours("replay", None, tiles) for layer in layers]
    return measured(dims, shape, ways, repetitions, device)


def run_deferral(dims: Dims, shape: Shape, device: str, snapshot: Any, repetitions: int) -> Row:
    """Return microseconds per layer and step of commits in every step and of deferred ones.

    A period's time is the mean over the steps from one write of the state to the next, with the rows that are pending
    in each; every step accepts the same number of tokens.
    """
    layers = make_layers(dims, shape, device)
    ways = common_ways(layers, snapshot)
    for variant in VARIANTS:
        ways[f"{variant}, commit"] = [layer.ours(variant, None) for layer in layers]
        ways[f"{variant}, fused"] = [layer.ours(variant, 1) for layer in layers]
        for period in PERIODS:
            steps = zip(*(layer.deferred(variant, period) for layer in layers), strict=True)
            ways[f"{variant}, every {period}"] = [launch for step in steps for launch in step]
    return measured(dims, shape, ways, repetitions, device)


def make_layers(dims: Dims, shape: Shape, device: str) -> list[Layer]:
    """Return as many layers as exceed the L2 cache."""
    copies = 1 if device == "cpu" else max(2, min(96, -(-L2_BYTES // (shape.requests * dims.state_bytes))))
    return [Layer(dims, shape, device, seed) for seed in range(copies)]


def common_ways(layers: list[Layer], snapshot: Any) -> dict[str, list[Launch]]:
    """Return what all is compared with."""
    ways: dict[str, list[Launch]] = {"copy": [layer.copy() for layer in layers]}
    if snapshot:
        ways["vllm"] = [layer.upstream(snapshot) for layer in layers]
    return ways


def measured(dims: Dims, shape: Shape, ways: dict[str, list[Launch]], repetitions: int, device: str) -> Row:
    """Return times, ratios over vLLM's of the same turn, and bytes."""
    samples = timed(ways, repetitions, device)
    result: Row = {
        "nodes": shape.nodes,
        "accepted": len(shape.accepted),
        "layers": len(ways["copy"]),
        "us": {name: summary(values) for name, values in samples.items()},
        "bytes": traffic(dims, shape),
    }
    if "vllm" in samples:
        result["over_vllm"] = {
            name: paired_ratio(values, samples["vllm"]) for name, values in samples.items() if name != "vllm"
        }
    return result


def bandwidth(dims: Dims, rows: list[Row]) -> float | None:
    """Return the best copy bandwidth seen, reads and writes counted."""
    seen = [
        2 * int(match[1]) * dims.state_bytes / row["us"]["copy"]["median"] / 1e3
        for row in rows
        if (match := re.match(r"batch (\d+)", row["case"]))
    ]
    return round(max(seen), 1) if seen else None


def table(rows: list[Row]) -> str:
    """Return medians in microseconds, the best way's share of vLLM's time, and memory held per request."""
    names = ["copy", "vllm", *WAYS]
    lines = ["| case | " + " | ".join(names) + " | best / vllm | spread | held, vllm/ours |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for row in rows:
        us = row["us"]
        cells = [f"{us[name]['median']:.1f}" if name in us else "-" for name in names]
        ours = {name: us[name]["median"] for name in kernel_targets.EACH_STEP}
        best = min(ours, key=lambda name: ours[name])
        ratio = f"{row['over_vllm'][best]['median']:.3f} ({best})" if "over_vllm" in row else f"- ({best})"
        spread = max((v["max"] - v["min"]) / v["median"] for v in us.values())
        held = row["bytes"]["vllm_held"] / row["bytes"]["fused_held" if "fused" in best else "commit_held"]
        lines.append(f"| {row['case']} | " + " | ".join(cells) + f" | {ratio} | {spread:.1%} | {held:.0f}x |")
    return "\n".join(lines)


def deferral_table(rows: list[Row]) -> str:
    """Return medians in microseconds per accepted token, and the best deferred commit over the best one at once."""
    if not rows:
        return "no deferred commits measured"
    names = [name for name in rows[0]["us"] if name != "copy"]
    lines = ["| us per accepted token | " + " | ".join(names) + " | deferred / each step |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for row in rows:
        us = {name: row["us"][name]["median"] / row["accepted"] for name in names}
        later = min(value for name, value in us.items() if "every" in name)
        at_once = min(us[name] for name in kernel_targets.EACH_STEP)
        cells = " | ".join(f"{us[name]:.2f}" for name in names)
        lines.append(f"| {row['case']}, {row['accepted']} accepted | {cells} | {later / at_once:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
