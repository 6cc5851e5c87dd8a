"""What people are told beside a result, on stderr."""

import contextlib
import sys


def note(line: str) -> None:
    """Print a line. Where it cannot be written (a full disk, a reader that is gone), the job goes on without it."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
