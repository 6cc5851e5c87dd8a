"""A log of a start that failed, read for what is known to help."""

from collections.abc import Callable, Iterable

from thor_spec.doctor.report import Check, Level, Report
from thor_spec.known import log_lines


def examine(lines: Iterable[str], first_odd_line: Callable[[Iterable[str]], str | None]) -> Report:
    """Return the first odd line with its remedy, then what else is known about.

    Args:
        first_odd_line: finds the cause in a log.
    """
    lines = list(lines)
    odd = first_odd_line(lines)
    cause = log_lines.find(odd) if odd else None
    checks = [
        Check(
            name="cause",
            level=Level.FAIL if odd else Level.OK,
            detail=odd or "no error in this log",
            remedy=(cause.remedy if cause else "Not a known one. Search vLLM's issues for it.") if odd else "",
        )
    ]
    for known, text in log_lines.find_all(lines).items():
        if known is not cause:
            level = Level.FAIL if known.fatal else Level.WARN
            checks.append(Check(name="also", level=level, detail=text[:200], remedy=known.remedy))
    return Report(checks=tuple(checks))
