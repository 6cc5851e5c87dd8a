"""Signals that ask the launcher to end: the first stops the job, the second skips the grace, more change nothing.

The end of the terminal (SIGHUP) counts, unless the launcher was detached from it: `nohup` has it ignored.
"""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """Counts stop signals while its ``with`` block runs, in the main thread.

    After a signal the process is about to end: more are ignored behind the block, too, to the last instruction.
    """

    def __init__(self) -> None:
        self.count = 0
        self.signalled = False
        """Whether a signal asked, and not somebody within."""
        self._previous: dict[int, Any] = {}

    @property
    def any(self) -> bool:
        """Return whether a stop was asked for."""
        return self.count > 0

    def urgent(self) -> bool:
        """Return whether the grace is to be skipped."""
        return self.count > 1

    def ask(self) -> None:
        """Ask from within, as a signal does from outside."""
        self.count += 1

    def __enter__(self) -> Self:
        wanted = [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
        self._previous = {signum: signal.signal(signum, self._handle) for signum in wanted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, signal.SIG_IGN if self.signalled else handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.signalled = True
        self.count += 1
