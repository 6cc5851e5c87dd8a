"""How long a start may take: by progress, phase by phase. No I/O and no clock of its own.

A fixed timeout is too short for the first compile and too long for a hang. Here a phase may be quiet for a while, has
a ceiling, and the whole start has one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from thor_spec.serve.activity import Activity, Motion
from thor_spec.serve.phases import Phase

MINUTE_S = 60.0
FIRST_START_S = 45 * MINUTE_S
CACHED_START_S = 15 * MINUTE_S
UTILIZATION_ALONE_S = 10 * MINUTE_S


class Limit(NamedTuple):
    """Seconds without progress, and seconds in all."""

    quiet_s: float
    ceiling_s: float


LIMITS: Mapping[Phase, Limit] = {
    Phase.START: Limit(60, 30 * MINUTE_S),
    Phase.WEIGHTS: Limit(120, 15 * MINUTE_S),
    Phase.PROFILE: Limit(300, 10 * MINUTE_S),
    Phase.COMPILE: Limit(10 * MINUTE_S, 25 * MINUTE_S),
    Phase.CAPTURE: Limit(300, 10 * MINUTE_S),
    Phase.SERVER: Limit(120, 10 * MINUTE_S),
    Phase.CANARY: Limit(120, 10 * MINUTE_S),
}


def longest_quiet_s(phase: Phase) -> float:
    """Return how long after its last progress a start may still be in a phase, with a busy GPU as the only sign."""
    return LIMITS[phase].quiet_s + UTILIZATION_ALONE_S


class Exceeded(StrEnum):
    """Which limit a start ran into."""

    QUIET = "quiet"
    PHASE = "phase"
    OVERALL = "overall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrun:
    """A start that must be given up."""

    phase: Phase
    exceeded: Exceeded
    limit_s: float
    gpu_was_busy: bool

    def describe(self) -> str:
        """Return what happened, in one sentence without its end."""
        limit = f"{self.limit_s / MINUTE_S:g} min" if self.limit_s >= 2 * MINUTE_S else f"{self.limit_s:g} s"
        if self.exceeded is Exceeded.OVERALL:
            return f"The start has not come to READY within {limit}; it is in the phase {self.phase}"
        if self.exceeded is Exceeded.PHASE:
            return f"The phase {self.phase} has not ended within {limit}"
        busy = ", though the GPU was busy" if self.gpu_was_busy else ""
        return f"The phase {self.phase} has made no progress for {limit}{busy}"


class Deadlines:
    """The limits of one start, fed with what the job does."""

    def __init__(self, now_s: float, *, cached: bool) -> None:
        self._began_s = now_s
        self._overall_s = CACHED_START_S if cached else FIRST_START_S
        self._motion = Motion()
        self._phase = Phase.START
        self._entered_s = self._progress_s = now_s
        self._gpu_s: float | None = None

    @property
    def progress_s(self) -> float:
        """When the start was last seen to make progress."""
        return self._progress_s

    def enter(self, phase: Phase, now_s: float) -> None:
        """A phase began, which is progress."""
        self._phase = phase
        self._entered_s = self._progress_s = now_s
        self._gpu_s = None

    def observe(self, activity: Activity, now_s: float) -> Overrun | None:
        """Take what the job has done by now; return the limit that it ran into, or None."""
        sign = self._motion.feed(activity, now_s)
        if sign.moved:
            self._progress_s = now_s
            self._gpu_s = None
        elif sign.gpu:
            self._gpu_s = now_s
        limit = LIMITS[self._phase]
        quiet_until = self._progress_s + limit.quiet_s
        if self._gpu_s is not None:
            # A kernel that never ends keeps the GPU busy too, so this sign alone carries only so far.
            quiet_until = max(quiet_until, min(self._gpu_s, self._progress_s + UTILIZATION_ALONE_S) + limit.quiet_s)
        if now_s - self._began_s > self._overall_s:
            return self._overrun(Exceeded.OVERALL, self._overall_s)
        if now_s - self._entered_s > limit.ceiling_s:
            return self._overrun(Exceeded.PHASE, limit.ceiling_s)
        if now_s > quiet_until:
            return self._overrun(Exceeded.QUIET, limit.quiet_s)
        return None

    def _overrun(self, exceeded: Exceeded, limit_s: float) -> Overrun:
        return Overrun(phase=self._phase, exceeded=exceeded, limit_s=limit_s, gpu_was_busy=self._gpu_s is not None)
