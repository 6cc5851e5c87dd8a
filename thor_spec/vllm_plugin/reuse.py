"""How much of each request came from the prefix cache, and why the rest did not.

Kept by the engine's process, read by the one that answers ``/metrics`` and by ``thor-spec status``; they share a small
file in the launcher's folder.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from thor_spec import env

REASONS = {
    "hit": "everything that could be reused was",
    "short": "the request is shorter than a block",
    "first": "no earlier request began with the same block: another system prompt, tools, or cache salt",
    "new": "its beginning was reused, and what follows was never asked before",
    "state": "the attention cache is there, but no recurrent state was kept at that boundary",
    "gone": "asked before and not there: evicted, or still being computed by another request",
}
"""Why a request reused no more than it did."""
RECENT = 16
REMEMBERED = 1 << 16  # blocks; a block's hash takes 32 bytes
_SUFFIX = ".reuse.npy"
_SHAPE = (len(REASONS) + RECENT, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """One request."""

    number: int
    tokens: int
    reused: int
    reason: str


class Account:
    """The engine's end."""

    def __init__(self, path: Path | None) -> None:
        # Rows of reasons: requests, tokens, tokens reused. Then the last requests: number, tokens, reused, reason.
        self.table = np.zeros(_SHAPE, dtype=np.int64)
        if path is not None:
            self.table = np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=_SHAPE)  # type: ignore[no-untyped-call]
        self._seen: OrderedDict[Any, None] = OrderedDict()
        self._number = 0

    @classmethod
    def open(cls) -> Self:
        """Return an account in the launcher's folder; where no launcher waits for us, nobody reads."""
        folder = env.receipts_dir()
        return cls(folder / f"{os.getpid()}{_SUFFIX}" if folder else None)

    def add(
        self, *, hashes: Sequence[Any], block: int, hashed: int, tokens: int, reused: int, stateless: bool = False
    ) -> str:
        """Count one request at its admission, and return the reason.

        Args:
            hashes: of its full blocks, each of all tokens up to its end.
            block: tokens between two places where a request can go on.
            hashed: tokens of a hashed block.
            tokens: of the request.
            reused: from the cache.
            stateless: whether attention alone could have reused more.
        """
        possible = (tokens - 1) // block * block
        reason = self._reason(hashes, possible, hashed, reused, stateless=stateless)
        for value in hashes:
            self._seen[value] = None
            self._seen.move_to_end(value)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        self._number += 1
        row = list(REASONS).index(reason)
        self.table[row, :3] += (1, tokens, reused)
        self.table[len(REASONS) + self._number % RECENT] = (self._number, tokens, reused, row)
        return reason

    def _reason(self, hashes: Sequence[Any], possible: int, hashed: int, reused: int, *, stateless: bool) -> str:
        if not possible:
            return "short"
        if reused >= possible:
            return "hit"
        if stateless:
            return "state"
        if reused // hashed < len(hashes) and hashes[reused // hashed] in self._seen:
            return "gone"
        return "new" if reused else "first"


def tables(folder: Path | None) -> Iterator[np.ndarray]:
    """Yield the table of each engine process in ``folder``, as far as there are any."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")) if folder else []:
        try:
            found = np.array(np.load(path, mmap_mode="r"))
        except (OSError, ValueError):  # just being made
            continue
        if found.shape == _SHAPE:
            yield found


def by_reason(folder: Path | None) -> dict[str, tuple[int, int, int]]:
    """Return requests, their tokens and the reused ones by reason."""
    total = sum((table[: len(REASONS), :3] for table in tables(folder)), np.zeros((len(REASONS), 3), dtype=np.int64))
    return {name: (int(row[0]), int(row[1]), int(row[2])) for name, row in zip(REASONS, total, strict=True)}


def recent(folder: Path | None) -> list[Reuse]:
    """Return the last requests of each engine process, the newest last."""
    names = list(REASONS)
    rows = [row for table in tables(folder) for row in table[len(REASONS) :].tolist() if row[0]]
    return [Reuse(number=n, tokens=t, reused=r, reason=names[w]) for n, t, r, w in sorted(rows)]
