"""How the launch is cut: by shapes known on the host alone, so that a captured graph keeps its grid."""

from dataclasses import dataclass
from functools import cache
from typing import Self

MAX_SPLITS = 128
WAVES = 3
"""Most programs for each one that a device holds at a time, if sequences are split; bounds the parts' memory too."""
LEAST = 2
_SHAPES = {16: (4, 32, 4, 2), 32: (4, 32, 3, 2), 64: (8, 32, 4, 1), 128: (8, 32, 4, 1)}
"""Warps, slots, stages and resident programs of a multiprocessor, by rows: what fits registers and shared memory."""
_MANY = 64
"""Multiprocessors from which on a device is taken for one with fast memory and accumulators in registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Rows are pairs of a node and a query head of one group, so that a tile of rows reads keys and values once."""

    rows: int
    slots: int
    splits: int
    """Most programs that share the slots of one sequence; more than one needs a merge."""
    warps: int
    stages: int = 3
    """Tiles of slots that a program holds: the one in use, and those on their way."""
    least: int = LEAST
    """Tiles of slots that a program takes at least: short sequences are cut less often."""

    @classmethod
    def choose(cls, *, width: int, group: int, requests: int, kv_heads: int, max_slots: int, sms: int) -> Self:
        """Choose for up to ``requests`` trees of up to ``width`` nodes over sequences of up to ``max_slots``."""
        # More rows would spill at 256 channels. On sm_110, where accumulators pass through tensor memory, 128 do so
        # already, and a second read of keys and values comes from the L2 cache, which its memory does not outrun.
        rows = min(128 if sms >= _MANY else 64, max(16, 1 << (width * group - 1).bit_length()))
        warps, slots, stages, resident = _SHAPES[rows]
        programs = -(-width * group // rows) * requests * kv_heads
        most = max(1, min(MAX_SPLITS, -(-max_slots // (slots * LEAST)), WAVES * sms * resident // programs))
        merge = 2 * width * group / max_slots  # bytes of a float32 part, written and read, over those of all slots
        splits = _splits(programs, sms * resident, most, merge)
        return cls(rows=rows, slots=slots, splits=splits, warps=warps, stages=stages)


@cache
def _splits(programs: int, resident: int, most: int, merge: float) -> int:
    """Return the number of splits, up to ``most``, that takes least time in whole rounds of ``resident`` programs."""

    def time(splits: int) -> float:
        return -(-programs * splits // resident) / splits * (1 + merge * (splits - 1))

    return min(range(1, most + 1), key=time)
