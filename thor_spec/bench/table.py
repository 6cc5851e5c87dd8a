"""Tables in Markdown, for a terminal and for a page."""

from collections.abc import Mapping, Sequence
from typing import Any

CHAT = (
    ("tok_s", "tok/s", ".1f"),
    ("ttft_s", "TTFT s", ".3f"),
    ("tpot_ms", "TPOT ms", ".2f"),
    ("tau", "τ", ".2f"),
    ("relaxed_share", "relaxed", ".0%"),
    ("joules_per_token", "J/token", ".2f"),
)
Row = Sequence[str]


def chat(summary: Mapping[str, Any]) -> tuple[Row, list[Row]]:
    """Return head and rows of a chat benchmark: medians with 95 % intervals, ratios to the first arm, and quality."""
    columns = [c for c in CHAT if any(rows.get(c[0]) for rows in summary.values())]
    has_quality = any("quality" in rows for rows in summary.values())
    judged = ["doctests", "parses", "perplexity", "distinct 1/2/3"] if has_quality else []
    lengths = ["steps by drafts"] if any(rows.get("by_length") for rows in summary.values()) else []
    head = ["arm", *(title for _, title, _ in columns), *lengths, *judged]
    return head, [
        [
            name,
            *(_cell(rows.get(k), f) for k, _, f in columns),
            *(_by_length(rows.get("by_length") or {}) for _ in lengths),
            *_quality(rows, judged),
        ]
        for name, rows in summary.items()
    ]


def _by_length(found: Mapping[Any, Mapping[str, float]]) -> str:
    each = (f"{k}: {f['share']:.0%}, {f['tokens']:.2f} tokens in {f['ms']:.2f} ms" for k, f in found.items())
    return "; ".join(each) or "-"


def _quality(rows: Mapping[str, Any], judged: Sequence[str]) -> list[str]:
    if not judged:
        return []
    found = rows.get("quality")
    if not found:
        return ["?"] * len(judged)
    varied = " / ".join(f"{share:.2f}" for share in found["distinct"])
    return [f"{found['passes']:.0%}", f"{found['parses']:.0%}", f"{found['perplexity']:.2f}", varied]


def _cell(found: Mapping[str, Any] | None, form: str) -> str:
    if not found:
        return "?"
    text = f"{found['median']:{form}} [{found['low95']:{form}}, {found['high95']:{form}}]"
    if ratio := found.get("ratio"):
        text += f" x {ratio['median']:.2f} [{ratio['low95']:.2f}, {ratio['high95']:.2f}]"
    return text


def agent(summary: Mapping[str, Any]) -> tuple[Row, list[Row]]:
    """Return head and rows of an agent benchmark, a row for each arm."""
    head = ["arm", "seconds", "times faster", "reused", "TTFT s, first and later turns", "τ by depth"]
    rows: list[Row] = []
    for name, found in summary.items():
        first, *later = found["ttft_s_by_turn"]
        depths = ", ".join(f"{depth} {tau:.2f}" for depth, tau in found["tau_by_depth"].items())
        rest = f"{sum(later) / len(later):.3f}" if later else "-"
        cells = [_cell(found[key], ".2f") for key in ("seconds", "times_faster")]
        rows.append([name, *cells, f"{found['hit_rate']:.0%}", f"{first:.3f}, {rest}", depths or "-"])
    return head, rows


SERVING = (
    ("output_throughput", "tok/s", ".1f"),
    ("request_throughput", "requests/s", ".2f"),
    ("median_ttft_ms", "TTFT ms", ".0f"),
    ("p99_ttft_ms", "p99", ".0f"),
    ("median_tpot_ms", "TPOT ms", ".2f"),
    ("p99_tpot_ms", "p99", ".2f"),
    ("completed", "completed", ".0f"),
    ("failed", "failed", ".0f"),
)


def serving(points: Sequence[Mapping[str, Any]]) -> tuple[Row, list[Row]]:
    """Return head and rows of a serving sweep, a row for each point."""
    head = ["concurrency", "requests/s asked", *(title for _, title, _ in SERVING)]
    rows: list[Row] = []
    for point in points:
        result = point["result"]
        figures = [f"{result[key]:{form}}" if result.get(key) is not None else "?" for key, _, form in SERVING]
        rows.append([str(point["concurrency"] or "∞"), str(point["request_rate"] or "∞"), *figures])
    return head, rows


def verdicts(found: Sequence[Mapping[str, Any]]) -> tuple[Row, list[Row]]:
    """Return head and rows of gates."""
    return ["gate", "", "what was found"], [[v["gate"], "green" if v["passed"] else "RED", v["summary"]] for v in found]


def markdown(head: Row, rows: Sequence[Row]) -> str:
    """Return a Markdown table with columns of equal width."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])
