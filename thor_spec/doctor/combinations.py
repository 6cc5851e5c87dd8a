"""Whether this machine and environment are, by themselves, a combination that is known not to work."""

import re
from collections.abc import Iterator
from typing import Any

from thor_spec import env
from thor_spec.device.machine import Machine
from thor_spec.doctor.report import Check, Level
from thor_spec.known import combinations

_L4T_TAG = re.compile(r"[:-]r(\d{2})(?:\.\d+)*\b", re.ASCII)  # 0.8.6-r36.4.0-cu128


def facts(machine: Machine, vllm: str | None, image: str | None = None) -> dict[str, Any]:
    """Return what is so without knowing what will be served. Options of a start are its own business."""
    found: dict[str, Any] = {"board": str(machine.board.kind)}
    if vllm is not None:
        found["vllm"] = vllm
    if image is not None:
        name, at, digest = image.partition("@")
        found["image"] = name
        found |= {"digest": digest} if at else {}
        found |= {"image_l4t": int(line[1])} if (line := _L4T_TAG.search(name)) else {}
    if (version := env.engine_variable("VLLM_FLASH_ATTN_VERSION")) and version.isdecimal():
        found["flash_attention"] = int(version)
    return found


def check(found: dict[str, Any]) -> Iterator[Check]:
    """Yield a line per combination, and one that says so where there is none."""
    matching = combinations.matching(found)
    for combination in matching:
        yield Check(
            name="known",
            level=Level.FAIL if combination.refuse else Level.WARN,
            detail=f"{combination.name}: {combination.describe()}",
            remedy=combination.remedy,
        )
    if not matching:
        yield Check(name="known", level=Level.OK, detail=f"none of {len(combinations.table())} bad combinations")
