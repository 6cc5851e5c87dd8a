"""The systemd unit: every setting of the specification is there, and systemd reads it as it is meant."""

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from thor_spec import errors
from thor_spec.guard import cgroup
from thor_spec.guard.unit import Unit, command_line

DEPLOY = Path(__file__).parents[2] / "deploy" / "systemd"
SETTINGS = {
    ("Service", "Type"): "notify",
    ("Service", "NotifyAccess"): "main",
    ("Service", "WatchdogSec"): "60",
    ("Service", "Delegate"): "yes",
    ("Service", "DelegateSubgroup"): cgroup.CONTROL_LEAF,
    ("Service", "KillMode"): "mixed",
    ("Service", "TimeoutStopSec"): "240",
    ("Service", "Restart"): "on-failure",
    ("Service", "RestartSec"): "60",
    ("Service", "RestartPreventExitStatus"): "2 10 11 12 13 14 22 40 41 42",
    ("Unit", "StartLimitIntervalSec"): "14400",
    ("Unit", "StartLimitBurst"): "3",
}


def parse(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(text)
    return parser


@pytest.mark.parametrize(("section", "key"), SETTINGS)
def test_each_setting_is_there_once(section: str, key: str) -> None:
    assert parse(Unit().as_text())[section][key] == SETTINGS[section, key]


def test_what_it_starts_and_what_it_reaps() -> None:
    service = parse(Unit(serve=("./model", "--context", "4096")).as_text())["Service"]
    assert service["ExecStart"] == "/usr/bin/thor-spec serve ./model --context 4096"
    assert service["ExecStopPost"] == "/usr/bin/thor-spec reap --own --yes"
    # The slice whose memory is protected for sshd must not be the job's.
    assert service["Slice"] != "system.slice"
    assert "MemoryMin" in parse((DEPLOY / "system.slice.d" / "thor-spec.conf").read_text())["Slice"]


def test_final_errors_are_those_that_a_restart_cannot_mend() -> None:
    final = set(map(int, SETTINGS["Service", "RestartPreventExitStatus"].split()))
    all_codes = {error.exit_code for error in vars(errors).values() if isinstance(error, type)}
    assert all_codes - final == {1, 20, 21, 30, 31, 32, 70}


def test_the_shipped_unit_is_the_default_one() -> None:
    assert (DEPLOY / "thor-spec.service").read_text() == Unit().as_text()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["/a", "b c", ""], '/a "b c" ""'),
        (["50%", "$HOME", 'say "x"', "back\\slash"], '50%% $$HOME "say \\"x\\"" "back\\\\slash"'),
        (["{'a': 1}", ";", "a;b", "@x"], '"{\'a\': 1}" ";" "a;b" @x'),
    ],
)
def test_quoting(argv: list[str], line: str) -> None:
    assert command_line(argv) == line


@pytest.mark.parametrize(
    "wrong",
    [
        {"user": "a b"},
        {"group": ""},
        {"user": "x\nExecStart=/bin/sh"},
        {"program": ("thor-spec",)},
        {"serve": ("a\nb",)},
    ],
)
def test_what_a_unit_cannot_hold_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(errors.ConfigError):
        Unit(**wrong)  # type: ignore[arg-type]


def test_systemd_accepts_it(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("not run: no systemd-analyze here")
    awkward = ("./model", "--served", 'a "b" $HOME 50% {"x": [1, 2]}', "--", "--foo=bar")
    unit = Unit(program=(sys.executable, "-m", "thor_spec"), user="root", group="root", serve=awkward)
    path = tmp_path / "thor-spec.service"
    path.write_text(unit.as_text())
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if str(path) in line or "thor-spec.service" in line]
    assert not [line for line in said if "'DelegateSubgroup'" not in line]  # systemd before 254 ignores that one


def test_the_command_prints_the_unit_of_this_machine() -> None:
    call = [
        sys.executable,
        "-m",
        "thor_spec",
        "service",
        "print",
        "--user",
        "demo",
        "--group",
        "video",
        "--",
        "m",
        "--",
        "-x",
    ]
    done = subprocess.run(call, capture_output=True, text=True, timeout=30)
    service = parse(done.stdout)["Service"]
    assert (done.returncode, service["User"], service["Group"]) == (0, "demo", "video")
    assert service["ExecStart"].endswith(" serve m -- -x")
    program = service["ExecStart"].split()[0]
    assert os.access(program, os.X_OK)
    assert service["ExecStopPost"].startswith(program)
