"""How long the phases of steps take on the device. Nothing waits: events are read steps later, when they have passed.

Without a GPU everything is done when it returns, and the host's clock tells.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from thor_spec.vllm_plugin import counters
from thor_spec.vllm_plugin.counters import PHASES_OF_TREES as PHASES

LAST = "built"
RING = 4  # steps whose events are kept; more are never under way


@dataclass(slots=True)
class Step:
    """One timed step."""

    number: int = -1
    label: Any = None
    """Whatever ``begin`` was given."""
    passed: dict[str, bool] = field(default_factory=dict)
    marks: dict[str, Any] = field(default_factory=dict)
    """A CUDA event each, or seconds of the host's clock."""


class Clock:
    """Times every step that verifies drafts."""

    def __init__(
        self, device: torch.device, writer: counters.HostWriter, heard: Callable[[Any, float, float], None]
    ) -> None:
        """``heard``: told label, seconds of verification, and seconds of the rest of the step (nan: not known)."""
        self._on_gpu = device.type == "cuda"
        self._ring = [Step() for _ in range(RING)]
        self._step: Step | None = None
        self._begun = self._started = self._heard_of = 0
        self.counted, self._heard = writer, heard
        self._before: tuple[Step, int, float] | None = None

    def begin(self, label: Any) -> None:
        """Start a step; it is left out while the device is too far behind to have events to spare."""
        self._listen()
        self._step = None
        self._begun += 1
        if self._started - self._heard_of >= RING:
            return
        step = self._ring[self._started % RING]
        step.number, step.label = self._begun, label
        step.passed.clear()
        self._started += 1
        self._step = step
        self.mark("begin")

    def mark(self, name: str, *, again: bool = True) -> None:
        """Note that the device comes by; ``again``: also where it did in this step."""
        step = self._step
        if step is None or (not again and name in step.passed):
            return
        if self._on_gpu:
            if name not in step.marks:
                step.marks[name] = torch.cuda.Event(enable_timing=True)
            step.marks[name].record()
        else:
            step.marks[name] = time.perf_counter()
        step.passed[name] = True
        if name == LAST:
            self._step = None

    def _listen(self) -> None:
        """Read the steps that have passed, in their order."""
        while self._heard_of < self._started:
            step = self._ring[self._heard_of % RING]
            if LAST in step.passed and self._on_gpu and not step.marks[LAST].query():
                return
            self._heard_of += 1
            if step is self._step:  # was broken off: nothing was sampled
                self._step = None
            if all(name in step.passed for pair in PHASES.values() for name in pair):
                self._read(step)
            else:
                self._before = None

    def _read(self, step: Step) -> None:
        seconds = {name: self._between(step, *pair) for name, pair in PHASES.items()}
        for place, name in enumerate(PHASES):
            self.counted.counts[place] += round(1e9 * seconds[name])
        self.counted.counts[len(PHASES)] += 1
        rest = float("nan")
        if self._before is not None and self._before[0].number == self._before[1] == step.number - 1:
            earlier, _, verified = self._before
            rest = self._apart(earlier.marks["begin"], step.marks["begin"]) - verified
        self._before = step, step.number, seconds["verify"]
        self._heard(step.label, seconds["verify"], rest)

    def _between(self, step: Step, first: str, last: str) -> float:
        return self._apart(step.marks[first], step.marks[last])

    def _apart(self, first: Any, last: Any) -> float:
        return float(first.elapsed_time(last)) / 1e3 if self._on_gpu else float(last - first)
