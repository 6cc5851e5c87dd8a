"""A launcher that dies: shim and watchdog stop the job, each also without the other."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from thor_spec.errors import BusyError
from thor_spec.guard.locks import RESIDENCY, LockDirectory
from thor_spec.guard.status import status

from .conftest import Engine
from .guarding import DEAF, ESCAPED, Launched, is_free, record
from .waiting import alive, until


def test_row02_a_killed_launcher_leaves_the_stop_to_shim_and_watchdog(
    launched: Callable[..., Launched], engine: Engine, locks: LockDirectory, state_dir: Path
) -> None:
    launcher = launched(engine.argv(DEAF, ESCAPED))
    pids = [engine.pid(name) for name in ("first", "child1")]
    launcher.kill()
    with pytest.raises(BusyError) as raised:
        locks.take(RESIDENCY)
    assert raised.value.exit_code == 10
    until(lambda: not any(alive(pid) for pid in pids))
    until(lambda: not status(locks).held)
    until(lambda: not alive(launcher.watchdog))
    assert record(state_dir).cause == "launcher died"


def test_row02_the_watchdog_does_it_alone_when_the_shim_is_stopped(
    launched: Callable[..., Launched], engine: Engine, locks: LockDirectory
) -> None:
    launcher = launched(engine.argv(DEAF, ESCAPED))
    pids = [engine.pid(name) for name in ("first", "child1")]
    os.kill(launcher.root, signal.SIGSTOP)
    launcher.kill()
    until(lambda: not any(alive(pid) for pid in pids))
    until(lambda: not status(locks).held)


def test_row02_the_watchdog_does_it_alone_when_the_shim_was_killed_too(
    launched: Callable[..., Launched], engine: Engine
) -> None:
    launcher = launched(engine.argv(DEAF, "pass", ESCAPED))
    pids = [engine.pid(name) for name in ("first", "child1", "child2")]
    launcher.kill()
    os.kill(launcher.root, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in pids))


def test_row02_the_grace_is_given_after_the_launchers_death(
    launched: Callable[..., Launched], engine: Engine, tmp_path: Path
) -> None:
    body = f"signal.signal(15, lambda *_: (time.sleep(0.3), open({str(tmp_path / 'saved')!r}, 'w'), sys.exit(0)))"
    launcher = launched(engine.argv(body), grace_s=20)
    engine.pid("first")
    launcher.kill()
    until((tmp_path / "saved").exists)
    until(lambda: not alive(launcher.watchdog))


def test_row03_launcher_and_watchdog_killed_keep_the_device_refused(
    launched: Callable[..., Launched], engine: Engine, locks: LockDirectory
) -> None:
    launcher = launched(engine.argv(DEAF, ESCAPED), grace_s=0.5)
    pids = [engine.pid(name) for name in ("first", "child1")]
    os.kill(launcher.watchdog, signal.SIGSTOP)
    os.kill(launcher.watchdog, signal.SIGKILL)
    launcher.kill()

    assert not is_free(locks, pids)
    until(lambda: is_free(locks, pids))
