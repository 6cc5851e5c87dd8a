"""NVML's readings, asked in a child: it does not survive a fork, and on unified memory half of it is not supported."""

import json
import subprocess
import sys
from typing import NamedTuple

PROBE_TIMEOUT_S = 20

# Runs as a program of its own: each call may be missing, and that is no error.
PROBE = """
import json, sys
try:
    import pynvml
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
except Exception:
    print(json.dumps(None)); sys.exit()

def ask(call, *args):
    try:
        answer = getattr(pynvml, call)(*args)
    except Exception:
        return None
    return answer.decode() if isinstance(answer, bytes) else answer

use = ask("nvmlDeviceGetUtilizationRates", device)
memory = ask("nvmlDeviceGetMemoryInfo", device)
print(json.dumps({
    "name": ask("nvmlDeviceGetName", device),
    "driver": ask("nvmlSystemGetDriverVersion"),
    "milliwatts": ask("nvmlDeviceGetPowerUsage", device),
    "celsius": ask("nvmlDeviceGetTemperature", device, 0),
    "percent": getattr(use, "gpu", None),
    "memory_bytes": getattr(memory, "total", None) or None,
    "clock_mhz": ask("nvmlDeviceGetClockInfo", device, 1),
}))
"""


class Nvml(NamedTuple):
    """One device. ``memory_bytes`` is None on unified memory, and nothing stands in for it."""

    name: str | None = None
    driver: str | None = None
    milliwatts: int | None = None
    celsius: int | None = None
    percent: int | None = None
    memory_bytes: int | None = None
    clock_mhz: int | None = None


def probe() -> Nvml | None:
    """Return the first device's readings; None without NVML."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse(done.stdout)


def parse(text: str) -> Nvml | None:
    """Return what the probe printed."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    texts = {name: value if isinstance(value := found.get(name), str) else None for name in ("name", "driver")}
    return Nvml(
        name=texts["name"],
        driver=texts["driver"],
        milliwatts=_number(found.get("milliwatts")),
        celsius=_number(found.get("celsius")),
        percent=_number(found.get("percent")),
        memory_bytes=_number(found.get("memory_bytes")),
        clock_mhz=_number(found.get("clock_mhz")),
    )


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
