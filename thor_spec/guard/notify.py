"""What the service manager hears from us: ready, alive, a longer start, what goes on, stopping.

Outside systemd every call is a no-op. A message is never waited for and never fails the caller: the job matters more.

Source: sd_notify(3), systemd.service(5); `NotifyAccess=main` admits this process only.
"""

import os
import socket

from thor_spec import env

_USEC = 1_000_000


class Notifier:
    """Messages to the service manager, for a supervisor to send at its phases."""

    def __init__(self, address: str | None, *, watchdog_s: float | None = None) -> None:
        """Make a notifier.

        Args:
            address: path of a datagram socket, or ``@name`` for an abstract one; None sends nothing.
            watchdog_s: seconds within which the service manager expects ``alive``; None when it expects nothing.
        """
        self._address = f"\0{address[1:]}" if address and address[0] == "@" else address
        self.watchdog_s = watchdog_s

    @classmethod
    def from_environment(cls) -> "Notifier":
        """Return the notifier for the service manager that started this process, if one did."""
        usec, pid = env.watchdog()
        meant = usec is not None and pid in (None, os.getpid())  # an inherited setting is for our parent
        return cls(env.notify_socket(), watchdog_s=usec / _USEC if usec and meant else None)

    @property
    def is_heard(self) -> bool:
        """Whether there is a service manager to talk to."""
        return self._address is not None

    def ready(self, status: str = "") -> bool:
        """Say that the canary set has passed; `systemctl start` returns then."""
        return self._send(READY=1, **_status(status))

    def alive(self) -> bool:
        """Feed the watchdog. Call it after a completed evaluation of liveness, never from a timer alone."""
        return self._send(WATCHDOG=1)

    def expect_within(self, seconds: float) -> bool:
        """Change the interval of the watchdog, for a time in which nothing can be evaluated, and back."""
        return self._send(WATCHDOG_USEC=int(seconds * _USEC), WATCHDOG=1)

    def extend(self, seconds: float) -> bool:
        """Ask that the running start or stop may take ``seconds`` from now. Call it on progress only."""
        return self._send(EXTEND_TIMEOUT_USEC=int(seconds * _USEC))

    def status(self, text: str) -> bool:
        """Show one line in `systemctl status`."""
        return self._send(**_status(text))

    def stopping(self, status: str = "") -> bool:
        """Say that the job is being stopped."""
        return self._send(STOPPING=1, **_status(status))

    def _send(self, **fields: object) -> bool:
        """Send one datagram; return whether the service manager has it."""
        if self._address is None or not fields:
            return False
        message = "\n".join(f"{name}={value}" for name, value in fields.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            try:
                channel.connect(self._address)
                channel.send(message.encode(), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            except OSError:
                return False
        return True


def _status(text: str) -> dict[str, str]:
    # One line: a line break would begin another field.
    return {"STATUS": "".join(c if c.isprintable() else " " for c in text)} if text else {}
