"""The log of a container, followed by a client of the runtime: one that dies does not touch it, and is replaced."""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from thor_spec.guard.container_runtime import ContainerRuntime

RETRY_S = 1.0  # between two clients that die
LAST_LINES_S = 2.0


class ContainerLog:
    """Copies what a container writes to a file or a descriptor, None being our own output."""

    def __init__(self, runtime: ContainerRuntime, container_id: str, output: int | None) -> None:
        self._runtime = runtime
        self._container_id = container_id
        self._output = output
        self._client: subprocess.Popen[bytes] | None = None
        self._followed_at: float | None = None
        self.follow()

    def follow(self) -> None:
        """Start a client where none runs."""
        now = time.time()  # the runtime's stamps are wall clock too
        if self._client and self._client.poll() is None:
            self._followed_at = now
        elif self._followed_at is None or now >= self._followed_at + RETRY_S:
            self._client = self._runtime.follow(self._container_id, self._output, since=self._followed_at)
            self._followed_at = now

    def close(self) -> None:
        """Let the last lines come, and end the client; the container must have ended."""
        if self._client:
            with suppress(subprocess.TimeoutExpired):
                self._client.wait(LAST_LINES_S)
            self._client.kill()
            self._client.wait()
            self._client = None
        if self._output is not None:
            os.close(self._output)
            self._output = None


def open_output(output: Path | int | None) -> int | None:
    """Return a descriptor of our own for a file to append to, or for a descriptor."""
    if isinstance(output, Path):
        return os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return None if output is None else os.dup(output)
