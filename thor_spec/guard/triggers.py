"""When memory is so short that the job must go at once. No I/O: readings in, a trigger or None out.

A board whose unified memory runs out wedges without an OOM kill, so each rule acts before that, on two signs in a row.
All times come with the readings, from a monotonic clock: setting the wall clock moves no rule.
"""

from collections import deque
from typing import NamedTuple

from thor_spec.guard.memory import GIB, Reading

WINDOW_S = 2.0
LEAST_WINDOW_S = 1.0  # fewer readings make a slope of noise
HORIZON_S = 1.0
SLOPE_BELOW_FLOORS = 3
PRESSURE_PERCENT = 20.0
PRESSURE_BELOW_FLOORS = 2
PRESSURE_S = 2.0
GAP_S = 5.0
POLLS = 2
KERNEL_SIGN = "NV_ERR_NO_MEMORY"
HOT_MILLIDEGREES = 105_000
_TIMING_SLACK_S = 1e-6  # differences of floats


class Trigger(NamedTuple):
    """Why the job was killed."""

    kind: str  # "floor", "slope", "pressure" or "kernel log"
    value: str
    limit: str
    available_bytes: int
    floor_bytes: int

    @property
    def margin_bytes(self) -> int:
        """MemAvailable above the floor; negative below it."""
        return self.available_bytes - self.floor_bytes

    def describe(self) -> str:
        """Return what was seen, in one line."""
        return f"{self.kind}: {self.value} ({self.limit}); margin to the floor {gib(self.margin_bytes)}"


def gib(size_bytes: float) -> str:
    """Return a size as people read it."""
    return f"{size_bytes / GIB:.2f} GiB"


class Triggers:
    """The rules, fed with one reading per poll."""

    def __init__(self, floor_bytes: int) -> None:
        self.floor_bytes = floor_bytes
        self._recent: deque[Reading] = deque()
        self._below = 0
        self._falling = 0
        self._pressed_since: float | None = None
        self._last: Reading | None = None

    def judge(self, reading: Reading) -> Trigger | None:
        """Take the next reading; return why the job must be killed now, or None."""
        if self._last and reading.at_s - self._last.at_s > GAP_S:
            # The machine slept, or we did not run. The slope's window is shorter and begins anew by itself.
            self._pressed_since = None
        self._last = reading
        self._recent.append(reading)
        while reading.at_s - self._recent[0].at_s > WINDOW_S + _TIMING_SLACK_S:
            self._recent.popleft()
        return self._floor(reading) or self._pressure(reading) or self._slope(reading)

    def kernel_line(self, line: str) -> Trigger | None:
        """Take a line of the kernel log that was written since the start of the job."""
        if KERNEL_SIGN not in line:
            return None
        available = self._last.available_bytes if self._last else 0
        return Trigger("kernel log", line.strip()[:200], f"{KERNEL_SIGN} at once", available, self.floor_bytes)

    def _floor(self, reading: Reading) -> Trigger | None:
        self._below = self._below + 1 if reading.available_bytes < self.floor_bytes else 0
        if self._below < POLLS:
            return None
        limit = f"below the floor of {gib(self.floor_bytes)} at {POLLS} polls"
        return self._trigger("floor", f"MemAvailable {gib(reading.available_bytes)}", limit, reading)

    def _pressure(self, reading: Reading) -> Trigger | None:
        full = reading.full_avg10
        short = reading.available_bytes < PRESSURE_BELOW_FLOORS * self.floor_bytes
        if full is None or full <= PRESSURE_PERCENT or not short:
            self._pressed_since = None
            return None
        if self._pressed_since is None:
            self._pressed_since = reading.at_s
        if reading.at_s - self._pressed_since < PRESSURE_S - _TIMING_SLACK_S:
            return None
        limit = f"above {PRESSURE_PERCENT:g} for {PRESSURE_S:g} s, below {PRESSURE_BELOW_FLOORS} floors"
        return self._trigger("pressure", f"full avg10 {full:g} %", limit, reading)

    def _slope(self, reading: Reading) -> Trigger | None:
        slope = self._bytes_per_s()
        near = reading.available_bytes < SLOPE_BELOW_FLOORS * self.floor_bytes
        crossing = slope is not None and reading.available_bytes + slope * HORIZON_S < self.floor_bytes
        self._falling = self._falling + 1 if near and crossing else 0
        if slope is None or self._falling < POLLS:
            return None
        limit = f"crosses the floor within {HORIZON_S:g} s"
        value = f"MemAvailable {gib(reading.available_bytes)}, {gib(slope)}/s"
        return self._trigger("slope", value, limit, reading)

    def _trigger(self, kind: str, value: str, limit: str, reading: Reading) -> Trigger:
        return Trigger(kind, value, limit, reading.available_bytes, self.floor_bytes)

    def _bytes_per_s(self) -> float | None:
        """Return the least-squares slope of MemAvailable over the window, or None when it is too short.

        The last step bounds it: one large allocation that is over (a KV cache) is no fall that goes on.
        """
        first, last = self._recent[0], self._recent[-1]
        if last.at_s - first.at_s < LEAST_WINDOW_S - _TIMING_SLACK_S or last.at_s == self._recent[-2].at_s:
            return None
        count = len(self._recent)
        middle_s = sum(r.at_s for r in self._recent) / count
        middle_bytes = sum(r.available_bytes for r in self._recent) / count
        spread = sum((r.at_s - middle_s) ** 2 for r in self._recent)
        joint = sum((r.at_s - middle_s) * (r.available_bytes - middle_bytes) for r in self._recent)
        before = self._recent[-2]
        return max(joint / spread, (last.available_bytes - before.available_bytes) / (last.at_s - before.at_s))
