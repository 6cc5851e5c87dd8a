"""Evidence: one JSON file per run, with its provenance; shared by the benchmarks."""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thor_spec import provenance
from thor_spec.bench import statistic
from thor_spec.record import without_places

SCHEMA = 1


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """Return median, extremes and count, rounded for reading."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "n": len(values),
    }


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> dict[str, float]:
    """Return the median of ``ours / theirs`` pair by pair, with a bootstrapped 95 % interval."""
    found = statistic.paired_ratio(ours, theirs, seed=seed)
    return {name: round(found[name], 4) for name in ("median", "low95", "high95")}


def write(
    name: str, result: dict[str, Any], *, seeds: dict[str, int] | None = None, instead_of: Path | None = None
) -> Path:
    """Write the record into ``$OUT`` or ``evidence/<utc>-<name>/`` and return its path.

    Args:
        instead_of: what an earlier call returned: a run that takes long writes what it has, again and again.
    """
    origin = provenance.collect(seeds)
    stamp = origin.utc.replace(":", "").replace("-", "")[:15]
    folder = Path(os.environ.get("OUT") or Path(__file__).parent.parent / "evidence" / f"{stamp}-{name}")
    path = instead_of or folder / ("record.json" if "OUT" not in os.environ else f"{name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    source = origin.as_dict()
    source["commit"] = os.environ.get("COMMIT") or source["commit"]  # of files that were copied without their history
    record = {"schema": SCHEMA, "name": name, "provenance": source, **result}
    path.write_text(without_places(json.dumps(record, indent=1)) + "\n", encoding="utf-8")
    return path
