"""Reading /proc, and signalling a process rather than a number."""

import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from thor_spec.guard import processes
from thor_spec.guard.members import Members

from .waiting import until

STAT = "4242 (a) b (R) S 7 4242 4200 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 38170 14905344 2844 0"


def test_a_name_may_look_like_the_fields_behind_it() -> None:
    assert processes.parse(STAT) == processes.Process(4242, 7, 4200, "S", 38170, "a) b (R")


def test_a_pid_with_another_start_time_is_another_process(bystander: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = processes.read(bystander().pid)
    assert process is not None
    reused = process._replace(start_ticks=process.start_ticks - 1)
    assert not processes.is_same(reused)
    assert not processes.send(reused, signal.SIGKILL)


def test_nobody_never_lives_and_is_never_signalled() -> None:
    assert not processes.is_same(processes.NOBODY)
    assert not processes.send(processes.NOBODY, signal.SIGTERM)  # pid 0 would be our own group
    assert Members(processes.NOBODY, has_shim=False).census() == []  # nor the session of that number


def test_a_process_knows_itself_by_its_pid_inside() -> None:
    assert processes.pid_inside(os.getpid()) == os.getpid()
    with subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", "cat"], stdin=-1, stderr=-1) as unshare:
        found = until(lambda: unshare.poll() or processes.descendants(unshare.pid))
        if unshare.returncode:
            pytest.skip("not run: this user may not make a pid namespace")
        assert processes.pid_inside(found[0].pid) == 1
    assert processes.pid_inside(found[0].pid) == 0


def test_a_zombie_is_not_signalled() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    process = processes.read(child.pid)
    assert process is not None
    assert not process.is_live
    assert not processes.send(process, signal.SIGTERM)
    child.wait()
    assert processes.read(child.pid) is None


def test_descendants_reach_grandchildren() -> None:
    with subprocess.Popen(["sh", "-c", "sh -c 'echo; read x; :' & read x"], stdin=-1, stdout=-1) as child:
        assert child.stdout
        child.stdout.readline()
        below = processes.descendants(os.getpid())
        assert child.pid in {p.pid for p in below}
        assert any(p.ppid == child.pid for p in below)
        child.kill()
