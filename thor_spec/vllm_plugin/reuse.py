"""How much of the requests came from the prefix cache, and why the rest did not.

Kept by the engine's process, read by the one that answers ``/metrics``.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from thor_spec import env
from thor_spec.vllm_plugin import tables
from thor_spec.vllm_plugin.reasons import REASONS

REMEMBERED = 1 << 16  # blocks; a block's hash takes 32 bytes
_SUFFIX = ".reuse.npy"
_SHAPE = (len(REASONS), 3)  # requests, their tokens, the reused ones


class Account:
    """The engine's end."""

    def __init__(self, path: Path | None) -> None:
        self.table = tables.create(path, _SHAPE)
        self._seen: OrderedDict[Any, None] = OrderedDict()

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
        self.table[list(REASONS).index(reason)] += (1, tokens, reused)
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


def by_reason(folder: Path | None) -> dict[str, tuple[int, int, int]]:
    """Return requests, their tokens and the reused ones by reason."""
    total = sum(tables.read(folder, _SUFFIX), np.zeros(_SHAPE, dtype=np.int64))
    return {name: (int(row[0]), int(row[1]), int(row[2])) for name, row in zip(REASONS, total, strict=True)}
