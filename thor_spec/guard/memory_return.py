"""Waiting for the memory of a job that is gone: on unified memory it can take tens of seconds to come back.

Another start meanwhile would begin on a starving pool, which is how a board gets wedged.
"""

import time
from collections import deque
from collections.abc import Callable

from thor_spec.errors import MemoryNotReturnedError
from thor_spec.guard.memory import GIB, MemorySource, Reading
from thor_spec.guard.triggers import gib

NEAR_BYTES = 2 * GIB
FLAT_S = 5.0
FLAT_BYTES = GIB // 4  # other programs move that much by themselves
LIMIT_S = 120.0
TICK_S = 0.5


def await_return(
    source: MemorySource,
    before_bytes: int,
    *,
    limit_s: float = LIMIT_S,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until MemAvailable is within 2 GiB of what it was before the start, and flat for 5 s.

    Time is that of the readings. Raises: MemoryNotReturnedError, after ``limit_s``.
    """
    recent: deque[Reading] = deque()
    began: float | None = None
    while True:
        now = source.read()
        began = now.at_s if began is None else began
        recent.append(now)
        while now.at_s - recent[0].at_s > FLAT_S + TICK_S:
            recent.popleft()
        values = [reading.available_bytes for reading in recent]
        flat = now.at_s - recent[0].at_s >= FLAT_S and max(values) - min(values) <= FLAT_BYTES
        if flat and before_bytes - now.available_bytes <= NEAR_BYTES:
            return
        if now.at_s - began >= limit_s:
            missing = before_bytes - now.available_bytes
            if missing <= NEAR_BYTES:
                raise MemoryNotReturnedError(
                    f"The job is gone, and free memory has not been still for {FLAT_S:g} s within {limit_s:g} s: "
                    "another program takes and returns it. Find it with `top`, then start again."
                )
            raise MemoryNotReturnedError(
                f"The job is gone and {gib(missing)} of memory have not come back within {limit_s:g} s; another start "
                "would begin on what is left. "
                "Run `sync; echo 3 | sudo tee /proc/sys/vm/drop_caches`; if that changes nothing, reboot the board."
            )
        sleep(TICK_S)
