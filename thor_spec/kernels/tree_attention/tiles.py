"""How the launch is cut: by shapes known on the host alone, so that a captured graph keeps its grid."""

from dataclasses import dataclass
from typing import Self

MAX_SPLITS = 64
WAVES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Rows are pairs of a node and a query head of one group."""

    rows: int
    slots: int
    splits: int
    """Programs that share the slots of one sequence; more than one needs a merge."""
    warps: int
    stages: int = 2

    @classmethod
    def choose(cls, *, width: int, group: int, requests: int, kv_heads: int, max_slots: int, sms: int) -> Self:
        """Choose for up to ``requests`` trees of up to ``width`` nodes over sequences of up to ``max_slots``."""
        rows = min(64, max(16, _power_of_2(width * group)))  # more would spill at 256 channels
        slots = 64 if rows <= 32 else 32
        programs = -(-width * group // rows) * requests * kv_heads
        splits = _power_of_2(-(-WAVES * sms // programs))
        splits = max(1, min(splits, MAX_SPLITS, _power_of_2(-(-max_slots // slots))))
        return cls(rows=rows, slots=slots, splits=splits, warps=4 if rows <= 32 else 8)


def _power_of_2(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()
