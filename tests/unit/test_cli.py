"""The command line as its users meet it: results on stdout, one or two lines of error on stderr, an exit code."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thor_spec import provenance
from thor_spec.cli import progress
from thor_spec.cli.main import app, main
from thor_spec.guard.locks import ADMISSION, LockDirectory
from thor_spec.known import combinations
from thor_spec.serve.phases import Phase

COMMANDS = (
    *("serve", "train", "train drafter", "tune", "tune moe", "run", "status", "stop", "top"),
    *("eval ppl", "eval longppl", "eval niah", "eval ruler"),
    *("plan", "profiles list", "profiles show", "profiles check"),
    *("reap", "doctor", "service print", "version"),
)
THOR_SPEC = (sys.executable, "-m", "thor_spec")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THOR_SPEC_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("INVOCATION_ID", raising=False)


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    out, err = capsys.readouterr()
    code = ended.value.code
    return code if isinstance(code, int) else 0, out, err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = call(capsys, *command.split(), "--help")
    assert code == 0
    assert f"Example: thor-spec {command}" in out


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["serve", "/nowhere"], 2, "No checkpoint at /nowhere"),
        (["serve", "--draft-tokens", "0"], 2, "at least 1"),
        (["serve", "--no-such-option"], 2, "No such option"),
        (["serve", "--port", "x"], 2, "Invalid value"),
        (["serve", "--profile", "/nowhere.yaml"], 2, "cannot be read"),
        (["serve", "--dry-run", "--", "--hf-overrides", "{"], 2, "needs JSON"),
        (["train", "drafter", "/nowhere", "--out", "x"], 2, "Missing option"),
        (["tune", "moe", "/nowhere", "--out", "x"], 2, "No checkpoint at /nowhere"),
        (["tune", "moe", "x", "--out", "x", "--timeout", "0"], 2, "must be positive"),
        (["serve", "--rope-factor", "2", "--dry-run"], 2, "--rope-factor needs a type"),
        (["eval", "ppl", "/nowhere", "--length", "128", "--out", "x"], 2, "No checkpoint at /nowhere"),
        (["eval", "niah", "/nowhere", "--length", "128", "--out", "x", "--rope", "ntk"], 2, "--rope ntk is not one of"),
        *(
            ([*command, "x", "--url", "http://127.0.0.1:1"], 2, "Leave out what is for one to start: model")
            for command in (["bench", "chat"], ["bench", "serving"], ["verify", "lossless"])
        ),
        *(
            (["bench", "serving", "tiny-hybrid", "--out", "/proc/x", "--concurrency", given], 2, says)
            for given, says in (
                *(("inf", "whole numbers"), ("1,0.5", "whole numbers"), ("2.5", "whole numbers")),
                *(("nan", "above 0"), ("0", "above 0"), ("-1", "above 0"), ("x", "must be numbers")),
            )
        ),
        *(
            (["bench", "serving", "tiny-hybrid", "--out", "/proc/x", f"--request-rate={given}"], 2, says)
            for given, says in (
                ("nan", "above 0"),
                ("0", "above 0"),
                ("1,-inf", "above 0"),
                ("inf", "cannot be written"),
            )
        ),
        (["run"], 2, "needs a command after --"),
        (["run", "--mount", "/", "--", "true"], 2, "Name its image with --container"),
        (["run", "--container", "vllm:latest", "--", "true"], 13, "not named by digest"),
        (["service", "print", "--user", "a b"], 2, "not the name of a user"),
        (["reap", "--own"], 2, "systemd unit"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_mistakes_are_told_in_short(capsys: pytest.CaptureFixture[str], argv: list[str], code: int, says: str) -> None:
    got, out, err = call(capsys, *argv)
    assert got == code
    assert says in err.replace("\n", " ")
    assert out == ""
    assert "Traceback" not in err
    if err.startswith("thor-spec: "):
        assert err.count("\n") <= 2


def test_an_image_that_is_known_to_be_bad_is_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = f"sha256:{'0' * 64}"
    bad = combinations.Combination("bad-build", (("digest", [digest]),), True, "fails", "Take another.", "one", ("x",))
    monkeypatch.setattr(combinations, "table", lambda: (bad,))
    code, _, err = call(capsys, "run", "--container", f"vllm@{digest}", "--", "true")
    assert code == 13
    assert "bad-build: fails (one source: x). Take another." in err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "--debug", "serve", "/nowhere")
    assert code == 2
    assert "Traceback" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert "thor-spec" in json.loads(call(capsys, "version", "--json")[1])
    assert call(capsys, "version")[1].startswith("thor-spec ")


def test_status_and_stop_when_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "status")[1] == "free\n"
    assert json.loads(call(capsys, "status", "--json")[1])["held"] is False
    assert call(capsys, "stop")[1] == "nothing to stop\n"


@pytest.mark.parametrize(("command", "code"), [(["true"], 0), (["false"], 1), (["sh", "-c", "kill -9 $$"], 137)])
def test_run_passes_the_exit_code_on(capsys: pytest.CaptureFixture[str], command: list[str], code: int) -> None:
    assert call(capsys, "run", "--", *command)[0] == code


def test_run_passes_output_through() -> None:
    done = subprocess.run([*THOR_SPEC, "run", "--", "echo", "--port", "1"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "--port 1\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["status", "status --json", "version", "profiles list", "--help"])
def test_output_that_cannot_be_written_is_told_in_a_line(command: str, unbuffered: str) -> None:
    argv, environment = [*THOR_SPEC, *command.split()], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    said = "thor-spec: What this command prints cannot be written (No space left on device).\n"
    assert (done.returncode, done.stderr) == (1, said)
    gone, out = os.pipe()
    os.close(gone)  # as of `thor-spec status | grep -q free`
    done = subprocess.run(argv, stdout=out, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(out)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("command", "code"),
    [("run -- true", 0), ("run -- false", 1), ("run --memory-floor 999TiB -- true", 12), ("plan x", 2)],
)
def test_row12_what_cannot_be_told_changes_no_exit_code(command: str, code: int) -> None:
    """A log on a full disk: the job goes on without it."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([*THOR_SPEC, *command.split()], stdout=full, stderr=full)
    assert done.returncode == code


def test_row12_a_start_goes_on_where_it_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with progress.progress(lambda _: None) as shown:
            shown.waiting(None)
            shown.phase(Phase.WEIGHTS)
            shown.notice("a notice")
            shown.stopping()
        monkeypatch.undo()
        with suppress(OSError):  # what is left in its buffer
            full.close()


def test_the_second_job_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([*THOR_SPEC, "run", "--", "sleep", "60"]) as first:
        while not LockDirectory.find().exists or call(capsys, "status")[1] == "free\n":
            assert first.poll() is None
            time.sleep(0.02)
        second = subprocess.run([*THOR_SPEC, "run", "--", "true"], capture_output=True, text=True)
        assert second.returncode == 10
        assert f"pid {first.pid}" in second.stderr
        assert "thor-spec stop" in second.stderr
        shown = json.loads(call(capsys, "status", "--json")[1])
        assert shown["holder"]["pid"] == first.pid
        assert "run sleep" in call(capsys, "status")[1]
        assert call(capsys, "stop", "--now")[:2] == (0, f"stopped run sleep (pid {first.pid})\n")
        assert first.wait(10) == 0
    LockDirectory.find().take(ADMISSION).release()


def test_shell_completion() -> None:
    env = {**os.environ, "_THOR_SPEC_COMPLETE": "complete_bash", "COMP_WORDS": "thor-spec s", "COMP_CWORD": "1"}
    done = subprocess.run([*THOR_SPEC], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["serve", "status", "stop", "service"]


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor", "--json")
    report = json.loads(out)
    assert code == 0, report
    names = {check["name"] for check in report["checks"]}
    assert names >= {"python", "torch", "triton", "vllm", "plugin", "gpu", "attention", "gdn", "seam", "lock", "memory"}


def test_doctor_fails_with_a_remedy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from thor_spec.vllm_plugin import seam

    monkeypatch.setattr(seam, "version", lambda: "0.99.0")
    code, out, _ = call(capsys, "doctor")
    assert code == 13
    assert "fail  vllm" in out
    assert "→ Install one of 0.32.0, 0.33.0." in out


def test_provenance_names_code_and_packages() -> None:
    record = provenance.collect(seeds={"torch": 1}).as_dict()
    assert record["packages"]["thor-spec"]
    assert record["seeds"] == {"torch": 1}
    assert json.dumps(record)


def test_importing_the_command_line_is_cheap() -> None:
    heavy = ("torch", "vllm", "httpx", "transformers")
    code = f"import sys, thor_spec.cli.main; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_app_is_usable_as_a_library() -> None:
    assert CliRunner().invoke(app, ["version", "--help"]).exit_code == 0
