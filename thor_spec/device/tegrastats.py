"""Lines of ``tegrastats``: four shapes are known, and a fifth will come, so every field is looked for by itself."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_RAM = re.compile(r"\bRAM (\d{1,9})/(\d{1,9})MB", re.ASCII)
_CPUS = re.compile(r"\bCPU \[([^\]]*)\]", re.ASCII)
_CPU = re.compile(r"^(\d{1,3})%", re.ASCII)
_EMC = re.compile(r"\bEMC_FREQ (?:(\d{1,3})%)?@(\d{1,6})", re.ASCII)
_GPU = re.compile(r"\bGR3D_FREQ (?:(\d{1,3})%)?(?:@\[?(\d{1,6}))?", re.ASCII)
_HEAT = re.compile(r"\b([a-z][a-z0-9_]*)@(-?\d{1,4}(?:\.\d{1,6})?)C\b", re.ASCII)
_RAIL = re.compile(r"\b([A-Z][A-Z0-9_]*) (-?\d{1,9})mW(?:/-?\d{1,9}mW)+", re.ASCII)
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TegraStats:
    """One line. Only root is told about the memory controller, the GPU's clock and load; a gated GPU has no heat."""

    ram_used_bytes: int | None = None
    ram_total_bytes: int | None = None
    cpu_percent: tuple[int | None, ...] = ()
    """By core; None for one that is switched off."""
    emc_percent: int | None = None
    emc_mhz: int | None = None
    gpu_percent: int | None = None
    gpu_mhz: int | None = None
    celsius: Mapping[str, float] = field(default_factory=dict)
    milliwatts: Mapping[str, int] = field(default_factory=dict)
    """By rail, now; may be below zero when idle."""


def parse(line: str) -> TegraStats:
    """Return what one line says."""
    ram, emc, gpu, cpus = (pattern.search(line) for pattern in (_RAM, _EMC, _GPU, _CPUS))
    return TegraStats(
        ram_used_bytes=int(ram[1]) * _MIB if ram else None,
        ram_total_bytes=int(ram[2]) * _MIB if ram else None,
        cpu_percent=tuple(_percent(core) for core in cpus[1].split(",")) if cpus and cpus[1] else (),
        emc_percent=_number(emc[1]) if emc else None,
        emc_mhz=_number(emc[2]) if emc else None,
        gpu_percent=_number(gpu[1]) if gpu else None,
        gpu_mhz=_number(gpu[2]) if gpu else None,
        celsius={name: float(value) for name, value in _HEAT.findall(line)},
        milliwatts={name: int(value) for name, value in _RAIL.findall(line)},
    )


def _percent(core: str) -> int | None:
    match = _CPU.match(core.strip())
    return int(match[1]) if match else None


def _number(text: str | None) -> int | None:
    return int(text) if text else None
