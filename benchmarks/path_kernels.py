"""Convolution, attention and compaction along tree paths: time per launch against the bytes that must move.

    python benchmarks/path_kernels.py [--repetitions 7] [--smoke]

``dense`` is torch's own attention over gathered keys and values with a dense mask, to show the order of magnitude; the
gathering, which a paged cache would need before it, is not in its time. A gate runs first: attention must agree with
``dense``. ``--smoke`` runs on the CPU, interpreted and tiny; its times mean nothing.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

if "--smoke" in sys.argv:  # before anything imports Triton
    from thor_spec.vllm_plugin import interpreter

    os.environ.update(interpreter.environment(os.environ.get("PYTHONPATH", "")))
    sys.path.insert(0, str(interpreter.PATH))

import torch

from benchmarks.graph_times import L2_BYTES, timed
from benchmarks.kernel_layers import best_first, chain
from benchmarks.path_layers import Dims, Launch, PathLayer
from benchmarks.record import summary, write

CASES = [
    (batch, name, context)
    for context in (1024, 8192, 32768)
    for batch in (1, 8)
    for name in ("chain 16", "ddtree 16", "ddtree 64")
]
TREES = {"chain 16": chain(16), "ddtree 16": best_first(15), "ddtree 64": best_first(63)}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.smoke else "cuda"
    dims = (
        Dims(channels=64, heads=4, kv_heads=2, head_dim=32, block_size=16, full_layers=2) if options.smoke else Dims()
    )
    sms = 4 if options.smoke else torch.cuda.get_device_properties(0).multi_processor_count
    worst = gate(dims, device, sms)
    rows = []
    for batch, name, context in [(2, "chain 16", 40)] if options.smoke else CASES:
        rows.append(case(dims, batch, name, context, device, sms, options.repetitions))
        print(rows[-1]["case"], file=sys.stderr, flush=True)
    result = {
        "smoke": options.smoke,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, interpreted",
        "gate": {"attention_relative_rms": worst},
        "cases": rows,
    }
    path = write("path-kernels-smoke" if options.smoke else "path-kernels", result)
    print(table(rows))
    print(path)


def gate(dims: Dims, device: str, sms: int) -> float:
    """Return the worst relative RMS against torch's attention. Raises: SystemExit, above what bfloat16 explains."""
    worst = 0.0
    for name, context in (("ddtree 64", 700), ("chain 16", 33)):
        layer = PathLayer(dims=dims, requests=2, parents=TREES[name], context=context, device=device, sms=sms)
        got, want = layer.attend()(), layer.dense()()
        want = want.transpose(1, 2).reshape(got.shape).double()
        error = float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())
        worst = max(worst, error)
    if not worst <= 2**-7:
        raise SystemExit(f"The gate is red, so no times: attention is {worst:.1e} from torch's.")
    return worst


def case(dims: Dims, batch: int, name: str, context: int, device: str, sms: int, repetitions: int) -> dict[str, Any]:
    """Return microseconds per launch and the floor in bytes."""
    first = PathLayer(dims=dims, requests=batch, parents=TREES[name], context=context, device=device, sms=sms)
    copies = 1 if device == "cpu" else max(2, min(64, -(-L2_BYTES // first.floor_bytes["attention"])))
    layers = [first] + [
        PathLayer(dims=dims, requests=batch, parents=TREES[name], context=context, device=device, sms=sms)
        for _ in range(copies - 1)
    ]
    ways: dict[str, list[Launch]] = {
        "conv": [layer.convolve() for layer in layers],
        "window": [layer.commit_window() for layer in layers],
        "attention": [layer.attend() for layer in layers],
        "dense": [layer.dense() for layer in layers],
        "compact": [layer.compact() for layer in layers],
    }
    samples = timed(ways, repetitions, device)
    return {
        "case": f"batch {batch}, {name}, context {context}",
        "us": {way: summary(values) for way, values in samples.items()},
        "floor_bytes": first.floor_bytes,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return medians in microseconds, and attention's share of what its bytes alone would take at 4 TB/s."""
    lines = [f"{'case':36} {'conv':>8} {'window':>8} {'attn':>8} {'dense':>8} {'compact':>8}  us at 4 TB/s (attn)"]
    for row in rows:
        us = {way: values["median"] for way, values in row["us"].items()}
        lines.append(
            f"{row['case']:36} {us['conv']:8.1f} {us['window']:8.1f} {us['attention']:8.1f} {us['dense']:8.1f} "
            f"{us['compact']:8.1f}  {row['floor_bytes']['attention'] / 4e6:8.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
