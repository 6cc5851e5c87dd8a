"""Records as one page of HTML that needs nothing else, and as Markdown tables.

The page is well-formed XML as well, so that a strict parser may check it; plots are SVG inside it.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from thor_spec.bench import table
from thor_spec.errors import PlatformError
from thor_spec.record import Record

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1a1a1a}"
    "table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}"
    "th,td{border-bottom:1px solid #ccc;padding:.3rem .7rem;text-align:left}"
    ".refused{border-left:4px solid #b00;padding-left:1rem}.origin{color:#666;font-size:.85em}"
    "svg{max-width:100%;height:auto}"
)
_KNOWN = ("bench-chat", "bench-serving")


def markdown(records: Sequence[Record]) -> str:
    """Return a section with a table for each record."""
    parts = []
    for record in records:
        parts.append(f"## {record.name}, {record.utc}")
        parts += [f"Not to be reported: {reason}." for reason in record.content.get("refused") or ()]
        parts += [table.markdown(*found) for found in tables(record.content)]
        parts.append(_origin(record))
    return "\n\n".join(parts) + "\n"


def html(records: Sequence[Record]) -> str:
    """Return the page. Raises: PlatformError, where matplotlib is missing."""
    sections = []
    for i, record in enumerate(records):
        refused = record.content.get("refused") or ()
        parts = [f'<h2 id="r{i}">{escape(record.name)}, {escape(record.utc)}</h2>']
        if refused:
            items = "".join(f"<li>{escape(reason)}</li>" for reason in refused)
            parts.append(f'<div class="refused"><p>Not to be reported:</p><ul>{items}</ul></div>')
        parts += [_table(*found) for found in tables(record.content)]
        parts += [] if refused else plots(record, prefix=f"r{i}")
        parts.append(f'<p class="origin">{escape(_origin(record))}</p>')
        sections.append("<section>" + "\n".join(parts) + "</section>")
    links = "".join(f'<li><a href="#r{i}">{escape(r.name)}, {escape(r.utc)}</a></li>' for i, r in enumerate(records))
    body = f"<h1>thor-spec: {len(records)} record{'s' * (len(records) != 1)}</h1><ul>{links}</ul>" + "\n".join(sections)
    return (
        '<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head><meta charset="utf-8"/>'
        f"<title>thor-spec report</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def tables(content: Mapping[str, Any]) -> list[tuple[table.Row, list[table.Row]]]:
    """Return the tables of a record of any kind; a kind that is not known here shows its top-level figures."""
    found = []
    if content.get("summary") and content["name"] == "bench-chat":
        found.append(table.chat(content["summary"]))
    if content["name"] == "bench-serving":
        found.append(table.serving(content["points"]))
    if content.get("verdicts"):
        found.append(table.verdicts(content["verdicts"]))
    if not found and content["name"] not in _KNOWN:
        plain = {k: v for k, v in content.items() if isinstance(v, str | int | float) and k != "schema"}
        found.append((["field", "value"], [[key, str(value)] for key, value in plain.items()]))
    return found


def plots(record: Record, *, prefix: str) -> list[str]:
    """Return the plots of a record, each an ``<svg>`` element."""
    if record.name == "bench-chat" and record.content.get("summary"):
        return [_drawn(lambda axes: _draw_speed(axes, record.content["summary"]), f"{prefix}s"),
                _drawn(lambda axes: _draw_places(axes, record.content["summary"]), f"{prefix}p")]  # fmt: skip
    if record.name == "bench-serving":
        return [_drawn(lambda axes: _draw_sweep(axes, record.content["points"]), f"{prefix}w")]
    return []


def _draw_speed(axes: Any, summary: Mapping[str, Any]) -> None:
    names = list(summary)
    medians = [summary[name]["tok_s"]["median"] for name in names]
    lows, highs = (
        [abs(summary[n]["tok_s"][e] - m) for n, m in zip(names, medians, strict=True)] for e in ("low95", "high95")
    )
    axes.barh(names, medians, xerr=[lows, highs], color="#4878a8", ecolor="#222", capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second, median and 95 % interval")


def _draw_places(axes: Any, summary: Mapping[str, Any]) -> None:
    for name, rows in summary.items():
        if rows["accepted_by_place"]:
            axes.plot(range(1, len(rows["accepted_by_place"]) + 1), rows["accepted_by_place"], marker="o", label=name)
    axes.set_xlabel("place in the draft")
    axes.set_ylabel("share of steps that accept it")
    axes.set_ylim(0, 1)
    if axes.lines:
        axes.legend(fontsize="small")


def _draw_sweep(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    done = [p for p in points if p["result"].get("output_throughput") is not None]
    by = "concurrency" if any(p["concurrency"] for p in done) else "request_rate"
    labels = [str(p[by] or "∞") for p in done]
    axes.plot(
        [p["result"]["output_throughput"] for p in done], [p["result"]["median_tpot_ms"] for p in done], marker="o"
    )
    for point, label in zip(done, labels, strict=True):
        axes.annotate(label, (point["result"]["output_throughput"], point["result"]["median_tpot_ms"]))
    axes.set_xlabel(f"output tokens per second (labels: {by.replace('_', ' ')})")
    axes.set_ylabel("median ms per token")


def _drawn(draw: Callable[[Any], None], salt: str) -> str:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlatformError(
            "The page needs matplotlib: pip install 'thor-spec[report]'. --markdown does without."
        ) from error
    # Ids are hashes of what they name and this salt: the same record gives the same page.
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        draw(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    # Matplotlib numbers its ids anew in each figure; on one page they must differ.
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{salt}-", svg)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def _table(head: table.Row, rows: Sequence[table.Row]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _origin(record: Record) -> str:
    origin = record.content.get("provenance", {})
    commit = str(origin.get("commit") or "no commit")[:12]
    dirty = {True: " with changes", False: "", None: ""}[origin.get("dirty")]
    packages = ", ".join(f"{name} {version}" for name, version in sorted((origin.get("packages") or {}).items()))
    machine = origin.get("machine") or {}
    where = machine.get("board") or machine.get("cpu") or machine.get("architecture")
    return f"{commit}{dirty}; {where}; {packages}; {record.path.parent.name}"
