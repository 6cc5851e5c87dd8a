"""Candidates for the cut of tree attention, timed over long contexts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.graph_times import L2_BYTES, timed
from benchmarks.kernel_layers import best_first, chain
from benchmarks.path_layers import Dims, PathLayer
from benchmarks.record import summary
from thor_spec.kernels.tree_attention.tiles import Tiles

TREES = {"chain 16": chain(16), "ddtree 64": best_first(63), "chain 8": chain(8)}
CASES = [(32768, 8, "chain 16"), (32768, 8, "ddtree 64"), (32768, 1, "chain 16"), (1024, 8, "chain 16"),
         (1024, 1, "chain 16"), (32768, 8, "chain 8")]  # fmt: skip
SHAPES = [(128, 8, 32, 4), (128, 8, 32, 3), (64, 8, 32, 4), (64, 4, 16, 4)]
"""Rows, warps, slots, stages: what compiles for sm_90a without spilling."""


def candidates(chosen: Tiles, rows_used: int) -> Iterator[tuple[str, Tiles]]:
    """Yield the chosen cut first, then other shapes and other numbers of splits."""
    yield "chosen", chosen
    for rows, warps, slots, stages in SHAPES:
        if rows > max(64, chosen.rows):
            continue
        tiles = replace(chosen, rows=rows, warps=warps, slots=slots, stages=stages)
        if tiles != chosen and rows_used > rows // 2:
            yield f"{rows} rows, {warps} warps, {slots} slots, {stages} stages", tiles
    for factor in (0.5, 2, 4):
        splits = max(1, int(chosen.splits * factor))
        if splits != chosen.splits:
            yield f"{splits} splits", replace(chosen, splits=splits)
    for least in (1, 4, 8):
        yield f"at least {least} tiles each", replace(chosen, least=least)


def attention_case(
    dims: Dims, batch: int, name: str, context: int, device: str, sms: int, repetitions: int
) -> dict[str, Any]:
    """Return microseconds per launch of every candidate, the bytes that must move, and torch's on gathered keys."""
    parents = TREES[name]

    def layer() -> PathLayer:
        return PathLayer(dims=dims, requests=batch, parents=parents, context=context, device=device, sms=sms)

    first = layer()
    copies = 1 if device == "cpu" else max(2, min(64, -(-L2_BYTES // first.floor_bytes["attention"])))
    layers = [first, *(layer() for _ in range(copies - 1))]
    group = dims.heads // dims.kv_heads
    chosen = Tiles.choose(
        width=len(parents), group=group, requests=batch, kv_heads=dims.kv_heads, max_slots=context + len(parents),
        sms=sms,
    )  # fmt: skip
    ways = {label: [each.attend(tiles) for each in layers] for label, tiles in candidates(chosen, len(parents) * group)}
    want = first.dense()().transpose(1, 2).flatten(0, 1).double()
    for label, launches in ways.items():
        error = float((launches[0]().double() - want).square().mean().sqrt() / want.square().mean().sqrt())
        if not error <= 2**-7:
            raise SystemExit(f"The gate is red, so no times: attention, {label}, is {error:.1e} from torch's.")
    samples = timed(ways, repetitions, device)
    return {
        "chosen": {name: getattr(chosen, name) for name in Tiles.__slots__},
        "us": {way: summary(values) for way, values in samples.items()},
        "floor_bytes": first.floor_bytes["attention"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return every candidate's median, and what the bytes alone would take at 4 TB/s."""
    lines = []
    for row in rows:
        lines.append(f"{row['case']}: {row['floor_bytes'] / 4e6:.1f} us at 4 TB/s; chosen {row['chosen']}")
        lines += [f"    {values['median']:9.1f} us  {way}" for way, values in row["us"].items()]
    return "\n".join(lines)
