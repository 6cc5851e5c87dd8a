"""Launch geometry by a small table: tuning at start-up would cost minutes, and these choices are few.

What is traded: a state is V rows that do not depend on each other, so rows may be split over programs until the device
is full; each split loads keys and queries again.
"""

from dataclasses import dataclass
from functools import cache

import torch

from thor_spec.errors import ConfigError

SOLVE_WARPS = {16: 1, 32: 2, 64: 4}
"""Of the launch that solves, by its most nodes. On an H200, 64 nodes of 8 requests took 114, 26.5 and 45 us with 2, 4
and 8 warps: fewer spill, more wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Geometry of one launch."""

    block_v: int
    """Rows of the state per program."""
    warps: int
    walkers: int = 1
    """Programs that share the leaves of one tree (replay)."""
    registers: int | None = None
    """Most registers of a thread (wy); None: the compiler's choice."""
    parts: int = 3
    """bfloat16 numbers that a float32 of the state is multiplied as (wy): two lose what is below 2^-17."""
    tf32: bool = False
    """Whether small products are ``tf32x3`` (wy) even where float16 serves: with normalized keys and queries."""
    solve_warps: int | None = None
    """Warps of the launch that solves for the nodes (wy); None: ``SOLVE_WARPS``."""

    def __post_init__(self) -> None:
        for name in ("block_v", "warps", "walkers", "solve_warps"):
            value = getattr(self, name)
            if value is not None and (value < 1 or value & (value - 1)):
                raise ConfigError(f"tiles.{name}={value} must be a power of two: Triton's ranges are.")
        if self.parts not in (2, 3):
            raise ConfigError(f"tiles.parts={self.parts} must be 2 or 3: a float32 state is never one bfloat16.")


@cache
def processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors."""
    if device.type != "cuda":
        return 1  # the interpreter runs one program after the other
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def launches_early(device: torch.device) -> bool:
    """Return whether a kernel may start before the one ahead of it has ended, and wait inside: from Hopper on."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (9, 0))


def replay_tiles(*, heads: int, value_dim: int, tree: bool, deferred: bool, sms: int) -> Tiles:
    """Return the geometry of the sequential variant: vLLM's, since it decides the order of sums over K.

    Lanes split a row of the state by the tile's shape and the number of warps; and which two products of a thread's
    first sum are fused depends, with some compilers, on the number of rows that the thread owns.

    Args:
        heads: states to advance, requests times value heads.
    """
    block_v = min(32, 1 << (value_dim - 1).bit_length())
    programs = heads * -(-value_dim // block_v)
    walkers = 1
    while tree and not deferred and walkers < 8 and programs * walkers < 2 * sms:
        walkers *= 2
    return Tiles(block_v=block_v, warps=4, walkers=walkers)


def wy_tiles(*, heads: int, value_dim: int, block: int, sms: int) -> Tiles:
    """Return the geometry of the closed form: 64 rows, Hopper's tile of a product.

    Fewer rows make more programs, but each needs keys, queries and the solution again: on an H200 even one request of
    32 heads, 64 programs for 132 multiprocessors, took longer that way. A few programs take as long as one of them, and
    two parts of the state gain nothing there (25.9 us, not 24.7, at batch 8). In many rounds it counts that two parts
    take fewer registers: three programs fit a multiprocessor, not two (121.5 us, not 148.7, at batch 64).

    Args:
        heads: states to read, requests times value heads.
        block: most nodes of the kernel: 16, 32 or 64.
    """
    block_v = min(64, max(16, 1 << (value_dim - 1).bit_length()))
    programs = heads * -(-value_dim // block_v)
    return Tiles(block_v=block_v, warps=4, parts=2 if block > 16 or programs >= 8 * sms else 3)


def commit_tiles(*, heads: int, value_dim: int, sms: int) -> Tiles:
    """Return the geometry of a commit, which waits for memory only."""
    return Tiles(block_v=_fill(heads, value_dim, largest=32, smallest=16, programs=2 * sms), warps=4)


def _fill(heads: int, value_dim: int, *, largest: int, smallest: int, programs: int) -> int:
    """Return the largest power of two of rows that still makes ``programs`` programs, within the limits."""
    block_v = largest
    while block_v > smallest and (heads * -(-value_dim // block_v) < programs or block_v // 2 >= value_dim):
        block_v //= 2
    return block_v
