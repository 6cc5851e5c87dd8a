"""The report: checks, rendered as text or JSON by whoever asks."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    WARN = "warn"  # works, or could not be read
    FAIL = "fail"  # serving cannot work


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding; ``remedy`` says what to do about a warning or a failure."""

    name: str
    level: Level
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings of one run."""

    schema: int = 1
    checks: tuple[Check, ...]

    @property
    def failed(self) -> bool:
        """Return whether serving cannot work here."""
        return any(check.level is Level.FAIL for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return the report, JSON-ready."""
        return asdict(self)

    def as_text(self) -> str:
        """Return one line per check, and a line below it for a remedy."""
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(f"{check.level:<4}  {check.name:<{width}}  {check.detail}".rstrip())
            if check.remedy:
                lines.append(f"{'':<4}  {'':<{width}}  → {check.remedy}")
        return "\n".join(lines)
