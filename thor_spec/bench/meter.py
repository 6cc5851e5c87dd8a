"""Power, heat and throttling while a repetition runs, sampled beside it. What cannot be read is None."""

import itertools
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from thor_spec.device import sensors, smi
from thor_spec.device.commands import Live

PERIOD_S = 0.5
_QUERY = (
    "nvidia-smi",
    "--query-gpu=power.draw,clocks_event_reasons.hw_slowdown,clocks_event_reasons.sw_thermal_slowdown,temperature.gpu",
    "--format=csv",
)
ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment."""

    at_s: float
    watts: float | None
    throttled: bool | None
    over_current_events: int | None
    degrees: float | None


@dataclass(slots=True)
class Meter:
    """Samples while its ``with`` block runs."""

    root: Path = ROOT
    samples: list[Sample] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.samples.append(sample(self.root))
        self._thread = threading.Thread(target=self._go, name="meter", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread:
            self._thread.join()
        self.samples.append(sample(self.root))

    def _go(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self.samples.append(sample(self.root))

    @property
    def joules(self) -> float | None:
        """Energy over the block, by trapezoids; None where power cannot be read."""
        known = [(s.at_s, s.watts) for s in self.samples if s.watts is not None]
        if len(known) < 2:
            return None
        steps = itertools.pairwise(known)
        return sum((later - at) * (watts + after) / 2 for (at, watts), (later, after) in steps)

    @property
    def throttling(self) -> str | None:
        """What shows that the machine slowed itself down meanwhile; None if nothing does."""
        if any(s.throttled for s in self.samples):
            return "the GPU's throttle alert was on"
        events = [s.over_current_events for s in self.samples if s.over_current_events is not None]
        if events and events[-1] > events[0]:
            return f"{events[-1] - events[0]} over-current events"
        return None

    @property
    def degrees(self) -> float | None:
        """Highest temperature, in degrees Celsius."""
        return max((s.degrees for s in self.samples if s.degrees is not None), default=None)


def sample(root: Path = ROOT) -> Sample:
    """Return what the board's own sensors tell, else what ``nvidia-smi`` does."""
    seen = sensors.read(root)
    watts = None if seen.total_milliwatts is None else seen.total_milliwatts / 1000
    throttled, degrees = seen.gpu_throttled, seen.celsius.get("tj")
    if watts is None and throttled is None and root == ROOT:
        watts, throttled, degrees = told_by_smi(Live().ask(_QUERY) or "")
    return Sample(time.monotonic(), watts, throttled, seen.over_current_events, degrees)


def told_by_smi(text: str) -> tuple[float | None, bool | None, float | None]:
    """Return watts, throttled and degrees Celsius of the first GPU in ``nvidia-smi``'s answer."""
    text = "\n".join(text.splitlines()[:2])
    row = next(iter(smi.parse_query(text)), {})
    reasons = re.findall(r"\b(Not )?Active\b", text)
    return row.get("power.draw"), any(not no for no in reasons) if reasons else None, row.get("temperature.gpu")
