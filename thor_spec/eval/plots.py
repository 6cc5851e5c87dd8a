"""Plots of evaluations. Each takes matplotlib axes, so that whoever makes a page decides on size and format."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thor_spec.errors import PlatformError
from thor_spec.eval import niah

Plot = tuple[str, Callable[[Any], None]]
"""A title, and what draws it."""


def of_record(content: Mapping[str, Any]) -> list[Plot]:
    """Return the plots of a record's content; none for kinds that are not evaluations.

    Raises: ConfigError, for needles without their control.
    """
    kind = content.get("name")
    if kind == "eval-ppl":
        lengths = sorted({int(length) for arm in content["summary"].values() for length in arm})
        return [
            (f"perplexity by position, {length:,} tokens", _banded(content["summary"], str(length), content["native"]))
            for length in lengths
        ]
    if kind == "eval-niah":
        cells = content["summary"]["cells"]
        niah.require_control(list(cells))
        return [(f"needles found, {arm}", _heatmap(cells[arm])) for arm in cells]
    if kind == "eval-ruler":
        return [("RULER, mean score over tasks", _by_length(content["summary"]))]
    return []


def tables(content: Mapping[str, Any]) -> list[tuple[list[str], list[list[str]]]]:
    """Return an evaluation's tables: a head and its rows."""
    kind = content.get("name")
    if kind == "eval-ppl":
        return [_far_table(content["summary"], content["native"])]
    if kind == "eval-longppl":
        head = ["arm", "LongPPL", "far LongPPL", "key tokens", "far", "ppl"]
        rows = [
            [arm, *(_shown(row[name]) for name in ("longppl", "far_longppl", "key_tokens", "far_key_tokens", "ppl"))]
            for arm, row in content["summary"].items()
        ]
        return [(head, rows)]
    if kind == "eval-niah":
        niah.require_control(list(content["summary"]["cells"]))
        return [_needle_table(content["summary"]["by_length"])]
    if kind == "eval-ruler":
        head = ["arm", "task", "length", "score", "n", "in full", "95 %"]
        rows = [
            [
                r["arm"],
                r["task"],
                str(r["length"]),
                _shown(r["score"]),
                str(r["n"]),
                str(r["in_full"]),
                _range(r["wilson95"]),
            ]
            for r in content["summary"]
        ]
        return [(head, rows)]
    return []


def save(content: Mapping[str, Any], folder: Path) -> list[str]:
    """Write each plot as an SVG into ``folder`` and return their names.

    Raises: PlatformError, where matplotlib is missing; ConfigError.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlatformError("Plots need matplotlib: pip install 'thor-spec[eval]'.") from error
    names = []
    for number, (title, draw) in enumerate(of_record(content)):
        # The same record gives the same file.
        with matplotlib.rc_context({"svg.hashsalt": title, "svg.fonttype": "none"}):
            figure = Figure(figsize=(7, 3.6), layout="constrained")
            axes = figure.subplots()
            draw(axes)
            axes.set_title(title)
            names.append(f"plot-{number}.svg")
            figure.savefig(folder / names[-1], metadata={"Date": None})
    return names


def _banded(summary: Mapping[str, Any], length: str, native: int) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        for arm, lengths in summary.items():
            bands = lengths.get(length, {}).get("bands", [])
            if bands:
                edges = [band["start"] for band in bands] + [bands[-1]["stop"]]
                axes.stairs([band["ppl"] for band in bands], edges, baseline=None, label=arm, linewidth=1.5)
        axes.axvline(native, color="#888", linestyle=":", linewidth=1)
        axes.set_yscale("log")
        axes.set_xlabel("position, tokens (dotted: end of the native context)")
        axes.set_ylabel("perplexity")
        axes.legend(fontsize="small")

    return draw


def _heatmap(cells: list[Mapping[str, Any]]) -> Callable[[Any], None]:
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    share = {(cell["length"], cell["depth"]): (cell["hits"], cell["n"]) for cell in cells}

    def draw(axes: Any) -> None:
        grid = [[share[length, depth][0] / share[length, depth][1] for length in lengths] for depth in depths]
        axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for row, depth in enumerate(depths):
            for column, length in enumerate(lengths):
                hits, n = share[length, depth]
                axes.text(column, row, f"{hits}/{n}", ha="center", va="center", fontsize="small")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set_xlabel("length, tokens")
        axes.set_ylabel("depth")

    return draw


def _by_length(rows: list[Mapping[str, Any]]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        for arm in dict.fromkeys(row["arm"] for row in rows):
            lengths = sorted({row["length"] for row in rows if row["arm"] == arm})
            scores = [[r["score"] for r in rows if (r["arm"], r["length"]) == (arm, length)] for length in lengths]
            axes.plot(lengths, [sum(found) / len(found) for found in scores], marker="o", label=arm)
        axes.set_ylim(0, 1)
        axes.set_xlabel("length, tokens")
        axes.set_ylabel("mean score")
        axes.legend(fontsize="small")

    return draw


def _near(bands: list[Mapping[str, Any]], native: int) -> float | None:
    """Return the perplexity within the native context, over all bands there."""
    near = [band for band in bands if band["stop"] <= native]
    tokens = sum(band["tokens"] for band in near)
    return math.exp(sum(band["tokens"] * math.log(band["ppl"]) for band in near) / tokens) if tokens else None


def _far_table(summary: Mapping[str, Any], native: int) -> tuple[list[str], list[list[str]]]:
    rows = []
    for arm, lengths in summary.items():
        for length, found in lengths.items():
            far = found["far"] or {}
            rows.append(
                [
                    arm,
                    length,
                    _shown(_near(found["bands"], native)),
                    _shown(far.get("ppl")),
                    _range(far.get("ppl95")),
                    _shown(far.get("ratio")),
                    _range(far.get("ratio95")),
                    str(far.get("tokens", 0)),
                ]
            )
    return ["arm", "length", "native ppl", "far ppl", "95 %", "to default", "95 %", "far tokens"], rows


def _needle_table(by_length: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            arm,
            str(row["length"]),
            f"{row['hits']}/{row['n']}",
            _range(row["wilson95"]),
            *([f"+{row['only_this']} -{row['only_control']}", _shown(row["p"])] if "p" in row else ["control", ""]),
        ]
        for arm, lengths in by_length.items()
        for row in lengths
    ]
    return ["arm", "length", "found", "95 %", "against control", "p"], rows


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _range(bounds: Any) -> str:
    return "-" if bounds is None else f"{bounds[0]:.3g} to {bounds[1]:.3g}"
