"""Outputs of ``nvidia-smi``. On unified memory its memory figures are absent, or nonsense; none is used here."""

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_VERSIONS = re.compile(r"Driver Version:\s*(\d[\d.]*)\s+CUDA Version:\s*(\d{1,3})\.(\d{1,3})", re.ASCII)
_NAME = re.compile(r"^\|\s+\d+\s+(\S.*?)\s+(?:On|Off)\s*\|", re.ASCII | re.MULTILINE)
_STATE = re.compile(r"^\|\s*\S+\s+(\d{1,3}C|N/A)\s+\S+\s+(\d{1,5}W|N/A)\s*/", re.ASCII | re.MULTILINE)
_USE = re.compile(r"\|\s+(\d{1,3})%\s+\S+\s+\|", re.ASCII)
_READING = re.compile(r"^\s*([\w-]+):\s*(-?\d{1,9}(?:\.\d{1,6})?)\s*(C|mW)\s*$", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The table of plain ``nvidia-smi``, of its first device."""

    driver: str | None = None
    cuda: tuple[int, int] | None = None
    name: str | None = None
    celsius: int | None = None
    watts: int | None = None
    percent: int | None = None


def parse_table(text: str) -> Summary:
    """Return what the table says."""
    versions, name, state, use = (pattern.search(text) for pattern in (_VERSIONS, _NAME, _STATE, _USE))
    return Summary(
        driver=versions[1] if versions else None,
        cuda=(int(versions[2]), int(versions[3])) if versions else None,
        name=name[1] if name else None,
        celsius=_leading(state[1]) if state else None,
        watts=_leading(state[2]) if state else None,
        percent=int(use[1]) if use else None,
    )


def parse_query(text: str) -> list[dict[str, float | None]]:
    """Return the rows of ``--query-gpu=… --format=csv`` by column, without units; ``[N/A]`` is None."""
    try:
        header, *rows = csv.reader(io.StringIO(text.replace("\0", "")), skipinitialspace=True)
    except (ValueError, csv.Error):
        return []
    names = [name.partition(" [")[0].strip() for name in header]
    return [{name: _float(cell) for name, cell in zip(names, row, strict=False)} for row in rows if row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Soc:
    """``nvidia-smi soc -q``, but for its memory figures, which are mislabelled."""

    celsius: Mapping[str, float] = field(default_factory=dict)
    milliwatts: Mapping[str, int] = field(default_factory=dict)


def parse_soc(text: str) -> Soc:
    """Return the heat by zone and the power by rail."""
    celsius: dict[str, float] = {}
    milliwatts: dict[str, int] = {}
    for line in text.splitlines():
        if match := _READING.match(line):
            if match[3] == "C":
                celsius[match[1].removesuffix("-thermal")] = float(match[2])
            else:
                milliwatts[match[1]] = int(float(match[2]))
    return Soc(celsius=celsius, milliwatts=milliwatts)


def _leading(text: str) -> int | None:
    match = re.match(r"\d+", text, re.ASCII)
    return int(match[0]) if match else None


def _float(cell: str) -> float | None:
    match = re.match(r"\s*(-?\d{1,12}(?:\.\d{1,6})?)\s*[^\s\d]*\s*$", cell, re.ASCII)
    return float(match[1]) if match else None
