"""Messages to the service manager, over real sockets of both kinds."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from thor_spec.guard.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    name = f"@thor-spec-test-{os.getpid()}-{time.monotonic_ns()}"
    address = str(tmp_path / "notify") if request.param == "path" else name
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(address.replace("@", "\0"))
        heard.settimeout(5)
        yield address, heard


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (lambda n: n.ready("serving tiny"), b"READY=1\nSTATUS=serving tiny"),
        (lambda n: n.ready(), b"READY=1"),
        (lambda n: n.alive(), b"WATCHDOG=1"),
        (lambda n: n.expect_within(240), b"WATCHDOG_USEC=240000000\nWATCHDOG=1"),
        (lambda n: n.extend(1.5), b"EXTEND_TIMEOUT_USEC=1500000"),
        (lambda n: n.status("weights\nREADY=1"), b"STATUS=weights READY=1"),
        (lambda n: n.stopping("asked to"), b"STOPPING=1\nSTATUS=asked to"),
    ],
    ids=["ready", "ready alone", "alive", "expect within", "extend", "status", "stopping"],
)
def test_messages(
    manager: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch, say: Callable[[Notifier], bool], message: bytes
) -> None:
    address, heard = manager
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notifier = Notifier.from_environment()
    assert notifier.is_heard
    assert say(notifier) is True
    assert heard.recv(4096) == message


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "@", "relative"])
def test_without_a_service_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notifier = Notifier.from_environment()
    assert (notifier.is_heard, notifier.ready(), notifier.status("")) == (False, False, False)


def test_a_deaf_or_missing_service_manager_fails_nobody(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    assert Notifier(address).ready() is False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(address)
        begun = time.monotonic()
        answers = [Notifier(address).alive() for _ in range(2000)]
        assert answers[0] is True
        assert answers[-1] is False  # its queue is full; we do not wait
        assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [
        ("60000000", None, 60.0),
        ("60000000", str(os.getpid()), 60.0),
        ("60000000", str(os.getpid() + 1), None),
        (None, None, None),
        ("x", None, None),
    ],
    ids=("anyone's", "ours", "another's", "none", "nonsense"),
)
def test_the_watchdog_is_ours_only_if_it_says_so(
    monkeypatch: pytest.MonkeyPatch, usec: str | None, pid: str | None, expected: float | None
) -> None:
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert Notifier.from_environment().watchdog_s == expected
