"""Turn about: what drifts on a machine while it is measured meets all sides alike."""

from collections.abc import Iterator, Reversible
from typing import TypeVar

Side = TypeVar("Side")


def turns(sides: Reversible[Side], count: int) -> Iterator[tuple[int, Side]]:
    """Yield ``count`` turns, each with every side, every other turn backwards: A B, B A, A B, ..."""
    for turn in range(count):
        for side in sides if turn % 2 == 0 else reversed(sides):
            yield turn, side
