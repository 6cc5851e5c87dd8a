"""Control groups: where a job's is made, and whose a group is. A folder stands in where only names matter."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from thor_spec.guard import cgroup

JOB = "0b6c1c9e-59e0-4e2b-8f39-4b9c5a4a1c11"
MOUNTS = (
    "24 1 0:22 / /proc rw,nosuid - proc proc rw\n"
    "31 24 0:27 / /sys/fs/cgroup/freezer rw shared:9 - cgroup cgroup rw,freezer\n"
    "33 24 0:29 / /sys/fs/cgroup/unified rw,nosuid shared:11 - cgroup2 cgroup2 rw\n"
)


def test_the_mount_point_is_that_of_version_2() -> None:
    assert cgroup.parse_mount_point(MOUNTS) == "/sys/fs/cgroup/unified"
    assert cgroup.parse_mount_point(MOUNTS.replace("cgroup2", "cgroup")) is None
    assert cgroup.parse_mount_point("") is None


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put this process into a group that is a folder, in which every new folder has a control group's files."""
    make = os.mkdir

    def mkdir(path: str, mode: int = 0o777) -> None:
        make(path, mode)
        for name in ("cgroup.kill", "cgroup.procs"):
            (Path(path) / name).touch()

    def own(group: str) -> Path:
        (tmp_path / group).mkdir(parents=True)
        monkeypatch.setattr(cgroup, "of_process", lambda: str(tmp_path / group))
        monkeypatch.setattr(os, "mkdir", mkdir)
        return tmp_path

    return own


def test_a_job_has_its_group_below_ours(own: Callable[[str], Path]) -> None:
    root = own("user.slice")
    assert cgroup.create(JOB) == f"{root}/user.slice/{cgroup.PREFIX}{JOB}"
    assert cgroup.job_of(cgroup.create(JOB.replace("0", "1")) or "") == JOB.replace("0", "1")


def test_in_a_delegated_unit_the_job_lies_beside_the_control_leaf(own: Callable[[str], Path]) -> None:
    unit = own("thorspec.slice/thor-spec.service/ctl") / "thorspec.slice/thor-spec.service"
    assert cgroup.create(JOB) == f"{unit}/job/{cgroup.PREFIX}{JOB}"
    again = cgroup.create(JOB.replace("0", "1"))  # the second job of the same unit
    assert again is not None
    assert set(cgroup.job_groups(str(unit))) >= {again}


@pytest.mark.parametrize("age_s", [0.0, 3600.0])
def test_a_group_that_was_left_is_removed_once_its_job_must_have_entered_it(
    own: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    own("user.slice")
    young = cgroup.create(JOB)
    removed: list[str] = []
    monkeypatch.setattr(cgroup, "remove", removed.append)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + age_s)
    assert cgroup.create(JOB.replace("0", "1"))
    assert removed == ([young] if age_s else [])


def test_a_group_that_cannot_be_made_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for group in ("/proc/no/such", "/proc/no/ctl", None):
        monkeypatch.setattr(cgroup, "of_process", lambda group=group: group)
        assert cgroup.create(JOB) is None


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/system.slice/docker-ID.scope", "system.slice/docker-ID.scope"),
        ("/machine.slice/libpod-ID.scope/container", "machine.slice/libpod-ID.scope"),
        ("/docker/ID/init", "docker/ID"),
        ("/system.slice/ssh.service", None),
        ("/", None),
        ("", None),
        ("/x/../docker-ID.scope", None),
    ],
)
def test_a_control_group_is_ours_only_by_the_containers_id(
    monkeypatch: pytest.MonkeyPatch, path: str, found: str | None
) -> None:
    monkeypatch.setattr(cgroup, "of_process", lambda _: f"/nowhere{path.replace('ID', 'a' * 64)}")
    expected = f"/nowhere/{found.replace('ID', 'a' * 64)}" if found else None
    assert cgroup.of_container(1, "a" * 64) == expected
    assert cgroup.of_container(1, "b" * 64) is None
    assert cgroup.of_container(1, "a") is None
    assert (cgroup.kill("/nowhere"), cgroup.is_populated("/nowhere"), cgroup.pids("/nowhere")) == (False, False, ())
