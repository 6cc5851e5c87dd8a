"""How long the phases of steps take on the device, and whole steps. Nothing waits: events are read steps later, when
they have passed; and since each costs the host some microseconds, only some steps have them.

Without a GPU everything is done when it returns, and the host's clock tells.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from thor_spec.vllm_plugin import counters
from thor_spec.vllm_plugin.counters import PHASES_OF_TREES as PHASES

NEXT = "next"
"""The mark of a step's end: the next one begins, whatever the device or the host has been busy with since."""
RING = 4  # steps whose events are kept; more are never under way
EVERY = 8  # steps from one that is timed to the next, on a GPU


@dataclass(slots=True)
class Step:
    """One timed step."""

    label: Any = None
    """Whatever ``begin`` was given."""
    followed_by: Any = None
    """The label of the next step."""
    passed: dict[str, bool] = field(default_factory=dict)
    marks: dict[str, Any] = field(default_factory=dict)
    """A CUDA event each, or seconds of the host's clock."""


class Clock:
    """Times steps that verify drafts."""

    def __init__(
        self, device: torch.device, writer: counters.HostWriter, heard: Callable[[Any, Any, float], None]
    ) -> None:
        """``heard``: told a step's label, that of the next one, and the seconds from its begin to that one's."""
        self._on_gpu = device.type == "cuda"
        self._every = EVERY if self._on_gpu else 1
        self._ring = [Step() for _ in range(RING)]
        self._step: Step | None = None
        self._last: Step | None = None
        self._begun = self._started = self._heard_of = 0
        self.counted, self._heard = writer, heard

    def begin(self, label: Any, *, wanted: bool = False) -> None:
        """Start a step. It is timed if it is ``wanted`` or its turn, unless the device is too far behind."""
        if self._last is not None:
            self._last.followed_by = label
            self._note(self._last, NEXT)
        self._listen()
        self._step = self._last = None
        self._begun += 1
        if not (wanted or self._begun % self._every == 0) or self._started - self._heard_of >= RING:
            return
        step = self._ring[self._started % RING]
        step.label = label
        step.passed.clear()
        self._started += 1
        self._step = self._last = step
        self.mark("begin")

    def mark(self, name: str, *, again: bool = True) -> None:
        """Note that the device comes by; ``again``: also where it did in this step."""
        step = self._step
        if step is not None and (again or name not in step.passed):
            self._note(step, name)

    def _note(self, step: Step, name: str) -> None:
        if self._on_gpu:
            if name not in step.marks:
                step.marks[name] = torch.cuda.Event(enable_timing=True)
            step.marks[name].record()
        else:
            step.marks[name] = time.perf_counter()
        step.passed[name] = True

    def _listen(self) -> None:
        """Read the steps that have passed, in their order."""
        while self._heard_of < self._started:
            step = self._ring[self._heard_of % RING]
            if self._on_gpu and not step.marks[NEXT].query():
                return
            self._heard_of += 1
            if all(name in step.passed for pair in PHASES.values() for name in pair):  # else nothing was sampled
                self._read(step)

    def _read(self, step: Step) -> None:
        for place, pair in enumerate(PHASES.values()):
            self.counted.counts[place] += round(1e9 * self._between(step, *pair))
        self.counted.counts[len(PHASES)] += 1
        self._heard(step.label, step.followed_by, self._between(step, "begin", NEXT))

    def _between(self, step: Step, first: str, last: str) -> float:
        a, b = step.marks[first], step.marks[last]
        return float(a.elapsed_time(b)) / 1e3 if self._on_gpu else float(b - a)
