"""The phases of an engine's start, as its log tells them."""

import re
from enum import StrEnum


class Phase(StrEnum):
    """In the order in which a start passes through them; compile and capture happen on a GPU only."""

    START = "start"
    WEIGHTS = "weights"
    PROFILE = "profile"
    COMPILE = "compile"
    CAPTURE = "capture"
    SERVER = "server"
    CANARY = "canary"
    READY = "ready"


# What vLLM logs when a phase begins. Read off versions 0.32 and 0.33; an unknown log costs detail, never a start.
_BEGINS = (
    (Phase.WEIGHTS, re.compile(r"Loading model from scratch|Starting to load model")),
    (Phase.PROFILE, re.compile(r"Model loading took")),
    (Phase.COMPILE, re.compile(r"Dynamo bytecode transform time|Compiling a graph for|Autotuning process starts")),
    (Phase.CAPTURE, re.compile(r"Capturing CUDA graphs")),
    (Phase.SERVER, re.compile(r"init engine \(profile")),
)
_ORDER = list(Phase)


def phase_begun(line: str, current: Phase) -> Phase | None:
    """Return the phase that ``line`` announces, if it comes after ``current``."""
    for phase, pattern in _BEGINS:
        if pattern.search(line) and _ORDER.index(phase) > _ORDER.index(current):
            return phase
    return None
