"""Keys and addresses: what is refused before anything is started, and where a key must not be seen."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from thor_spec.cli.main import main
from thor_spec.config import ServeConfig
from thor_spec.errors import ConfigError
from thor_spec.serve import api_key

KEY = "0123456789abcdef-SECRET"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "tiny-hybrid", *argv])
    code = ended.value.code
    return (code if isinstance(code, int) else 0, *capsys.readouterr())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_this_machine_needs_no_key(host: str) -> None:
    assert api_key.read(ServeConfig(host=host)) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "board.local", ""])
def test_any_other_address_needs_one_or_a_word(host: str, key_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"Give --api-key-file FILE \(mode 0600\), or --insecure"):
        api_key.read(ServeConfig(host=host))
    assert api_key.read(ServeConfig(host=host, insecure=True)) is None
    assert api_key.read(ServeConfig(host=host, api_key=KEY)) == KEY
    assert api_key.read(ServeConfig(host=host, api_key_file=key_file)) == KEY


def test_vllm_s_own_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert api_key.read(ServeConfig(host="0.0.0.0")) == KEY


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o610])
def test_a_file_that_others_may_touch_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        api_key.read(ServeConfig(api_key_file=key_file))
    key_file.chmod(0o400)  # as systemd hands credentials over
    assert api_key.read(ServeConfig(api_key_file=key_file)) == KEY


@pytest.mark.parametrize(
    "text", ["", "\n", "short\n", "two words of a key that is long\n", f"{KEY}\n{KEY}\n", "é" * 20]
)
def test_a_key_that_is_none_is_refused_and_not_shown(key_file: Path, text: str) -> None:
    key_file.write_text(text)
    with pytest.raises(ConfigError) as error:
        api_key.read(ServeConfig(api_key_file=key_file))
    for line in filter(None, text.splitlines()):
        assert line not in str(error.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        api_key.read(ServeConfig(api_key_file=tmp_path / "none"))
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=r"not a plain file|cannot be read"):
            api_key.read(ServeConfig(api_key_file=path))


def test_key_and_file_exclude_each_other(key_file: Path) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        ServeConfig(api_key=KEY, api_key_file=key_file)


@pytest.mark.parametrize("form", [("--json",), ()])
def test_a_dry_run_shows_no_key(capsys: pytest.CaptureFixture[str], key_file: Path, form: tuple[str, ...]) -> None:
    for option in (("--api-key", KEY), ("--api-key-file", str(key_file))):
        code, out, err = call(capsys, "--host", "0.0.0.0", *option, "--dry-run", *form)
        assert code == 0
        assert "SECRET" not in out + err
    if not form:
        assert "VLLM_API_KEY='(hidden)'" in out


def test_the_key_is_in_the_engine_s_environment_alone(capsys: pytest.CaptureFixture[str]) -> None:
    plan: dict[str, Any] = json.loads(call(capsys, "--api-key", KEY, "--dry-run", "--json")[1])
    assert plan["config"]["api_key"]["value"] == "(hidden)"
    assert KEY not in repr(ServeConfig(api_key=KEY))
    assert "--api-key" not in plan["argv"]
    middlewares = [plan["argv"][i + 1] for i, arg in enumerate(plan["argv"]) if arg == "--middleware"]
    assert [name.rpartition(".")[2] for name in middlewares] == ["FrontDoor", "Gate"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--host", "0.0.0.0"), "there is no key"),
        (("--", "--api-key", "x"), "would stand in the engine's argv"),
        (("--", "--enable-log-requests"), "would write prompts"),
        (("--", "--enable_log_outputs"), "would write prompts"),
        (("--max-request-bytes", "0"), "must be positive"),
        (("--", "--host", "0.0.0.0"), "contradicts"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str) -> None:
    head, passed = (argv[: argv.index("--")], argv[argv.index("--") :]) if "--" in argv else (argv, ())
    code, _, err = call(capsys, *head, "--dry-run", *passed)
    assert code == 2
    assert says in err


def test_logging_prompts_takes_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--insecure", "--dry-run", "--", "--enable-log-requests")[0] == 0
