"""Whether this machine and environment are, by themselves, a combination that is known not to work."""

from collections.abc import Iterator
from typing import Any

from thor_spec import env
from thor_spec.device.board import Board
from thor_spec.doctor.report import Check, Level
from thor_spec.known import combinations


def facts(board: Board, vllm: str | None = None, image: str | None = None) -> dict[str, Any]:
    """Return what is so without knowing what will be served. Options of a start are its own business."""
    found: dict[str, Any] = {"board": str(board.kind)}
    if vllm is not None:
        found["vllm"] = vllm
    if image is not None:
        found |= combinations.of_image(image)
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
