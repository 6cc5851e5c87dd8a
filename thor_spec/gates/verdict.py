"""What a gate found."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FINDINGS_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of one gate, with the figures that it stands on."""

    gate: str
    passed: bool
    summary: str
    """One line: what was compared, and how it came out."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    """What a person should look at: ties that were accepted, and what made the gate red."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-ready."""
        return asdict(self)

    def as_text(self) -> str:
        """Return the line of a table, and the findings below it."""
        head = f"{'ok  ' if self.passed else 'FAIL'}  {self.gate:14} {self.summary}"
        more = len(self.findings) - FINDINGS_SHOWN
        shown = [f"      {finding}" for finding in self.findings[:FINDINGS_SHOWN]]
        return "\n".join([head, *shown, *([f"      and {more} more, in the record"] if more > 0 else [])])
