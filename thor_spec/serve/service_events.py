"""Events, told to the service manager as well: `systemctl start` returns at READY, and a launcher that hangs is ended.

A start may take as long as it makes progress. What feeds the service manager's watchdog is a completed evaluation of
the rules, never a timer: those of liveness, and during a restart those of a start.

Source: sd_notify(3), systemd.service(5): STOPPING=1 counts for a running unit, EXTEND_TIMEOUT_USEC for one that starts.
"""

from thor_spec.guard.identity import Identity
from thor_spec.guard.notify import Notifier
from thor_spec.serve import deadlines
from thor_spec.serve.events import Events, Ready
from thor_spec.serve.phases import Phase

STOP_S = 240.0  # a grace, 60 s for the processes, 120 s for the memory; TimeoutStopSec= of our unit
SLACK_S = 60.0


class ServiceEvents:
    """The events of ``shown``, and some that only a service manager hears; outside systemd nobody hears those."""

    def __init__(self, shown: Events, notifier: Notifier) -> None:
        self._shown = shown
        self._notifier = notifier
        self._phase = Phase.START

    def waiting(self, holder: Identity | None) -> None:
        """Show for whom."""
        self._notifier.status(f"waiting for {holder.describe() if holder else 'the device'}")
        self._shown.waiting(holder)

    def phase(self, phase: Phase) -> None:
        """Show the phase; that it began is progress."""
        self._phase = phase
        if phase is not Phase.READY:
            self._notifier.status(f"starting: {phase}")
            self._extend()
        self._shown.phase(phase)

    def ready(self, ready: Ready) -> None:
        """Say so: the unit is up."""
        self._notifier.ready(f"serving {ready.model} at {ready.url}")
        if self._notifier.watchdog_s is not None:
            self._notifier.expect_within(self._notifier.watchdog_s)
        self._shown.ready(ready)

    def notice(self, line: str) -> None:
        """Pass it on."""
        self._shown.notice(line)

    def progressed(self) -> None:
        """The start made progress: ask for as much time as our own deadlines would give."""
        self._extend()

    def evaluated(self) -> None:
        """The rules of a start or of a ready engine were gone through, and it goes on: feed the watchdog."""
        self._notifier.alive()

    def stopping(self) -> None:
        """Pass it on; what the service manager must know comes with ``ending``."""
        self._shown.stopping()

    def ending(self, *, again: bool) -> None:
        """The engine is about to be ended, for whatever cause; ``again`` says that another start follows."""
        if again:
            self._notifier.status("stopping a stalled engine, to start it once more")
            if self._notifier.watchdog_s is not None:
                self._notifier.expect_within(STOP_S)
        else:
            self._notifier.stopping("stopping")
            self._notifier.extend(STOP_S)

    def _extend(self) -> None:
        self._notifier.extend(deadlines.longest_quiet_s(self._phase) + SLACK_S)
