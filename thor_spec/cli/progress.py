"""A start, as it is shown: a live line with elapsed times on a terminal, plain lines elsewhere. Writes to stderr."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from thor_spec.cli.notes import note
from thor_spec.guard.identity import Identity
from thor_spec.serve.events import Events, Ready
from thor_spec.serve.phases import Phase


class Progress(Protocol):
    """A display that is up while its ``with`` block runs, and takes a start's events meanwhile."""

    def __enter__(self) -> Events:
        """Put the display up."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it down."""


def progress(report: Callable[[Ready], None]) -> Progress:
    """Return the display that fits stderr; ``report`` is called at READY."""
    return LiveProgress(report) if sys.stderr.isatty() else PlainProgress(report)


def _waiting_for(holder: Identity | None) -> str:
    return f"waiting for {holder.describe()}" if holder else "waiting for the device"


class PlainProgress:
    """One line per event, with the seconds since the start."""

    def __init__(self, report: Callable[[Ready], None]) -> None:
        self._report = report
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End without a trace."""

    def waiting(self, holder: Identity | None) -> None:
        """Say for whom."""
        self._say(_waiting_for(holder))

    def phase(self, phase: Phase) -> None:
        """Name the phase."""
        if phase is not Phase.READY:
            self._say(str(phase))

    def ready(self, ready: Ready) -> None:
        """Report."""
        self._report(ready)

    def notice(self, line: str) -> None:
        """Pass it on."""
        self._say(line)

    def stopping(self) -> None:
        """Say so."""
        self._say("stopping (again to skip the grace)")

    def _say(self, text: str) -> None:
        note(f"[{time.monotonic() - self._began:6.1f} s] {text}")


class LiveProgress:
    """The phases so far with the time each took; the current one ticks."""

    def __init__(self, report: Callable[[Ready], None]) -> None:
        self._report = report
        self._phases: list[tuple[str, float]] = []
        self._live = Live(
            console=Console(stderr=True), refresh_per_second=8, get_renderable=self._table, transient=False
        )
        self._spinner = Spinner("dots")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._phases.append(("", time.monotonic()))
        self._live.stop()

    def waiting(self, holder: Identity | None) -> None:
        """Show for whom."""
        self._begin(_waiting_for(holder))

    def phase(self, phase: Phase) -> None:
        """Close the line of the phase before, and begin one."""
        if phase is not Phase.READY:
            self._begin(str(phase))

    def ready(self, ready: Ready) -> None:
        """Freeze what was shown, and report below it."""
        self._phases.append(("", time.monotonic()))
        self._live.stop()
        self._report(ready)

    def notice(self, line: str) -> None:
        """Pass it on, above the phases while they are shown."""
        self._live.console.print(line, markup=False)

    def stopping(self) -> None:
        """Say so below what was shown."""
        self._live.console.print("stopping (again to skip the grace)")

    def _begin(self, name: str) -> None:
        self._phases.append((name, time.monotonic()))

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        ends = [began for _, began in self._phases[1:]] + [time.monotonic()]
        for i, ((name, began), ended) in enumerate(zip(self._phases, ends, strict=True)):
            if name:
                running = i == len(self._phases) - 1
                table.add_row(self._spinner if running else Text("✓"), name, f"{ended - began:.1f} s")
        return table
