"""Power modes of the board, as ``nvpmodel`` and ``jetson_clocks`` answer."""

import re
from typing import NamedTuple


class Mode(NamedTuple):
    """One power mode of Thor. Source: the KernelBench power study of March 2026."""

    name: str
    gpu_mhz: int
    cpu_mhz: int
    needs_reboot: bool


THOR_MODES = {
    0: Mode("MAXN", 1575, 2601, False),
    1: Mode("120W", 1386, 2601, False),
    2: Mode("90W", 1530, 2601, True),
    3: Mode("70W", 1530, 1998, True),
}


class PowerMode(NamedTuple):
    """The mode that is set."""

    name: str
    number: int | None


_MODE = re.compile(r"^NV Power Mode\s*:\s*(\S+)[ \t]*(?:\n[ \t]*(\d{1,3})[ \t]*$)?", re.ASCII | re.MULTILINE)


def parse_mode(text: str) -> PowerMode | None:
    """Return the mode in the output of ``nvpmodel -q``."""
    match = _MODE.search(text)
    return PowerMode(match[1], int(match[2]) if match[2] else None) if match else None


def refusal(text: str) -> str | None:
    """Return why ``nvpmodel`` or ``jetson_clocks`` did nothing, in our words; None where it did what it should."""
    if "Reboot required" in text:
        return "the mode needs a reboot, which nvpmodel asks for interactively"
    if "as a root user" in text or "Permission denied" in text:
        return "it must be run as root"
    return "it failed" if re.search(r"^(NVPM ERROR|Error)\b", text, re.MULTILINE) else None
