"""What the kernels are to reach on the GPU they were measured against, and whether a run has shown it."""

from collections.abc import Callable, Iterator
from typing import Any

EACH_STEP = ("replay, commit", "replay, fused", "wy, commit", "wy, fused")
"""Ways that end a step with every accepted token in the state."""
REPLAY = ("replay, commit", "replay, fused")
Row = dict[str, Any]


def targets(cases: list[Row], deferrals: list[Row], gate: Row) -> list[Row]:
    """Return the targets in order: what, limit, measured, whether it is reached (None: not measured), and by which way.

    Args:
        cases: rows of ``kernels.py`` with ``case``, ``us``, ``over_vllm``, ``bytes``.
        deferrals: rows of chains with commits at once and deferred ones.
        gate: what was checked before.
    """
    by_name = {row["case"]: row for row in (*cases, *deferrals)}

    def result(
        what: str, measured: float | None, limit: float, by: str = "", *, least: bool = False, strict: bool = False
    ) -> Row:
        reached = None
        if measured is not None:
            reached = measured >= limit if least else measured < limit or (measured == limit and not strict)
            measured = round(measured, 4)
        sign = ">=" if least else "<" if strict else "<="
        return {"what": what, "limit": f"{sign} {limit:g}", "measured": measured, "reached": reached, "by": by}

    def every() -> Iterator[Row]:
        for batch, limit in ((1, 0.35), (8, 0.25), (64, 0.17)):
            row = by_name.get(f"deferral, batch {batch}, chain 16") or by_name.get(f"batch {batch}, chain 16")
            ways = EACH_STEP if row is None else (*EACH_STEP, *_deferring(row))
            yield result(f"chain 16, batch {batch}: verify + commit over vLLM", *_best(row, "vllm", limit, ways))
        row = by_name.get("batch 64, chain 16")
        yield result("goal: chain 16, batch 64: over one read and write", *_best(row, "copy", 2, EACH_STEP))
        for nodes in (2, 4, 8):
            for batch in (1, 8, 64):
                row = by_name.get(f"deferral, batch {batch}, chain {nodes}")
                yield result(
                    f"chain {nodes}, batch {batch}: deferred commit over immediate", *_deferred(row), strict=True
                )
        yield result("random cases with vLLM's bits", gate["identical"], 1000, "replay", least=True)
        for batch, limit in ((1, 1.25), (8, 1.0), (16, 1.0), (64, 1.0)):
            row = by_name.get(f"batch {batch}, chain 16")
            yield result(f"replay, batch {batch}: verify + commit over vLLM", *_best(row, "vllm", limit, REPLAY))
        tree, chain = by_name.get("batch 8, ddtree 64"), by_name.get("batch 8, chain 16")
        measured, by = None, ""
        if tree and chain:
            (ours, by), (theirs, _) = (_fastest(row, EACH_STEP) for row in (tree, chain))
            measured = ours / theirs
        yield result("tree of 64, batch 8: over the chain of 16", measured, 1.5, by)
        held = None
        if tree:
            _, by = _fastest(tree, EACH_STEP)
            held = tree["bytes"]["vllm_held"] / tree["bytes"]["fused_held" if "fused" in by else "commit_held"]
        yield result("tree of 64: memory of snapshots over ours", held, 80, by, least=True)

    return list(every())


def table(rows: list[Row]) -> str:
    """Return one line per target, and how many are reached."""
    mark: Callable[[bool | None], str] = {True: "yes", False: "NO", None: "not measured"}.__getitem__
    lines = ["| target | limit | measured | reached | by |", "|---|---|---|---|---|"]
    for row in rows:
        measured = "-" if row["measured"] is None else f"{row['measured']:g}"
        lines.append(f"| {row['what']} | {row['limit']} | {measured} | {mark(row['reached'])} | {row['by']} |")
    counts = [sum(row["reached"] is value for row in rows) for value in (True, False, None)]
    return "\n".join([*lines, "targets: {} reached, {} not reached, {} not measured".format(*counts)])


def _fastest(row: Row, names: tuple[str, ...]) -> tuple[float, str]:
    us = {name: values["median"] for name, values in row["us"].items() if name in names}
    name = min(us, key=lambda name: us[name])
    return us[name], name


def _best(row: Row | None, base: str, limit: float, names: tuple[str, ...]) -> tuple[float | None, float, str]:
    """Return the fastest way's time over that of ``base``, the limit, and its name."""
    if row is None or base not in row["us"]:
        return None, limit, ""
    us, name = _fastest(row, names)
    if base == "vllm":
        return row["over_vllm"][name]["median"], limit, name
    return us / row["us"][base]["median"], limit, name


def _deferring(row: Row) -> tuple[str, ...]:
    """Return the ways whose time is the mean over the steps from one write of the state to the next."""
    return tuple(way for way in row["us"] if "every" in way)


def _deferred(row: Row | None) -> tuple[float | None, float, str]:
    """Return the best deferred commit over the best one in every step, fused or not: both accept alike."""
    if row is None:
        return None, 1, ""
    at_once, first = _fastest(row, EACH_STEP)
    later, name = _fastest(row, _deferring(row))
    return later / at_once, 1, f"{name}; {first}"
