"""What an administrator installs, checked as far as it can be without an engine, by the tools that know it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from thor_spec.doctor import overlay

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
CONTAINERFILES = ("Containerfile", "Containerfile.cpu")
COMPOSE = {
    "compose.yaml": {"THOR_SPEC_IMAGE": "x@sha256:0", "LOCK_GROUP": "10", "MODELS": "/models"},
    "compose.replicas.yaml": {"ROUTER_IMAGE": "x@sha256:0"},
}


def tool(name: str) -> str:
    """Return a tool of the development environment, which must be there."""
    found = BIN / name
    assert found.exists(), f"{name} is missing: make setup-dev"
    return str(found)


@pytest.mark.parametrize("name", CONTAINERFILES)
def test_hadolint(name: str) -> None:
    done = subprocess.run([tool("hadolint"), DEPLOY / name], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_complain(tmp_path: Path) -> None:
    bad = tmp_path / "Containerfile"
    bad.write_text("FROM debian\nRUN sudo true\n")
    assert subprocess.run([tool("hadolint"), bad], capture_output=True).returncode == 1


@pytest.mark.parametrize("path", [DEPLOY / "entrypoint", ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_shellcheck(path: Path) -> None:
    done = subprocess.run([tool("shellcheck"), path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", CONTAINERFILES)
def test_containerfiles_run_as_somebody_and_check_by_a_request(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE)[-1] == "10001:10001"
    assert "thor_spec.serve.healthcheck" in text
    assert "latest" not in text
    for volume in json.loads(re.findall(r"^VOLUME (.*)$", text, re.MULTILINE)[0]):
        assert f"install -d -o 10001 -g 10001 {volume}" in text  # or docker makes it, for root
    for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert re.fullmatch(r"\$\{\w+\}", base)  # nothing but an argument, which a pin fills


def test_every_file_that_a_containerfile_copies_is_there() -> None:
    for name in CONTAINERFILES:
        for line in re.findall(r"^COPY (?!--from)(.*)$", (DEPLOY / name).read_text(), re.MULTILINE):
            *sources, _ = line.split()
            for source in sources:
                assert (ROOT / source).exists(), f"{name}: {source}"


def test_the_manifest_is_written_before_anything_of_ours() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    stage = text[text.rindex("\nFROM ") :]
    assert stage.index("overlay.py record") < stage.index("pip install")
    assert overlay.MANIFEST in stage


@pytest.mark.parametrize(
    ("base", "code"), [(f"vllm/vllm-openai@sha256:{'a' * 64}", 0), ("vllm/vllm-openai:v0.33.0", 1), ("x@sha256:12", 1)]
)
def test_the_build_refuses_a_tag(base: str, code: int) -> None:
    """The shell line of the Containerfile itself, up to its first command."""
    text = (DEPLOY / "Containerfile").read_text()
    line = re.search(r"^RUN (\[\[ .*?\}) ;", text, re.MULTILINE)
    assert line is not None
    done = subprocess.run(["bash", "-c", line[1]], env={"BASE": base}, capture_output=True)
    assert done.returncode == code


@pytest.mark.parametrize("name", COMPOSE)
def test_compose_files_are_shut(name: str) -> None:
    services = yaml.safe_load((DEPLOY / name).read_text())["services"]
    for service in services.values():
        assert service["read_only"] is True
        assert service["user"] == "10001:10001"
        assert service["cap_drop"] == ["ALL"]
        assert service["restart"] == "no"
        assert "no-new-privileges:true" in service["security_opt"]
        assert "by digest" in service["image"]
        assert "pid" not in service
        assert "privileged" not in service
        assert all(volume.get("read_only") or volume["type"] == "volume" for volume in service.get("volumes", ()))


def test_the_engine_s_compose_file_holds_the_lock() -> None:
    from thor_spec.guard import entrypoint

    engine = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["engine"]
    mounts = {volume["target"]: volume["source"] for volume in engine["volumes"]}
    assert mounts[entrypoint.LOCK] == "/run/lock/thor-spec/residency"
    assert engine["command"][:3] == ["thor-spec", "serve", "--exec"]
    assert "thor_spec.serve.healthcheck" in engine["healthcheck"]["test"]
    assert engine["network_mode"] == "host"
    assert "--host" not in engine["command"]


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="not run: no docker-compose here")
@pytest.mark.parametrize("name", COMPOSE)
def test_compose_accepts_them(name: str, tmp_path: Path) -> None:
    argv = ["docker-compose", "-f", str(DEPLOY / name), "config", "-q"]
    path = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    assert subprocess.run(argv, env={**path, **COMPOSE[name]}, capture_output=True).returncode == 0
    missing = subprocess.run(argv, env=path, capture_output=True, text=True)
    assert missing.returncode != 0
    assert "by digest" in missing.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="not run: no systemd-analyze here")
def test_the_container_s_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "thor-spec-container.service").read_text()
    unit = tmp_path / "thor-spec-container.service"
    unit.write_text(text.replace("/usr/bin/thor-spec", sys.executable).replace("Requires=docker.service\n", ""))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "thor-spec-container" in line]
    assert not [line for line in said if "'DelegateSubgroup'" not in line], said


def test_both_units_restart_alike() -> None:
    def settings(name: str) -> dict[str, str]:
        text = (DEPLOY / "systemd" / name).read_text()
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))

    host, container = settings("thor-spec.service"), settings("thor-spec-container.service")
    for key in ("Restart", "RestartSec", "RestartPreventExitStatus", "KillMode", "TimeoutStopSec", "Delegate", "Slice"):
        assert host[key] == container[key], key


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    """A copy of the tool and its file, and a docker that answers."""
    for source in ("tools/pins.py", "deploy/pins.yaml"):
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, tmp_path / source)
    manifest: dict[str, Any] = {
        "manifests": [
            {"digest": f"sha256:{letter * 64}", "platform": {"os": "linux", "architecture": arch}}
            for letter, arch in (("a", "amd64"), ("b", "arm64"))
        ]
    }
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(manifest)}\nEND\n")
    docker.chmod(0o755)
    return tmp_path


def run_pins(folder: Path, *argv: str) -> tuple[int, str]:
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    argv = (sys.executable, str(folder / "tools" / "pins.py"), *argv)
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    return done.returncode, done.stdout + done.stderr


def test_the_pins_are_well_formed_and_still_empty(pins: Path) -> None:
    code, out = run_pins(pins, "check")
    assert code == 0
    assert out.count("empty") == len(out.splitlines())
    assert run_pins(pins, "show", "thor-base") == (
        1,
        "The slot thor-base is empty. Fill it: python tools/pins.py refresh thor-base\n",
    )


def test_refreshing_a_slot_takes_the_platform_s_digest_and_keeps_the_comments(pins: Path) -> None:
    before = (pins / "deploy/pins.yaml").read_text().splitlines()
    assert run_pins(pins, "refresh", "thor-base") == (0, f"thor-base: sha256:{'b' * 64}\n")
    assert run_pins(pins, "show", "thor-base") == (0, f"vllm/vllm-openai@sha256:{'b' * 64}\n")
    after = (pins / "deploy/pins.yaml").read_text().splitlines()
    changed = [line.split(":")[0].strip() for old, line in zip(before, after, strict=True) if old != line]
    assert changed == ["digest", "refreshed"]
    assert run_pins(pins, "refresh", "cuda-base")[1] == f"cuda-base: sha256:{'a' * 64}\n"
    assert run_pins(pins, "check")[0] == 0


def test_a_wrong_pin_is_found(pins: Path) -> None:
    path = pins / "deploy/pins.yaml"
    path.write_text(path.read_text().replace("digest: null", "digest: sha256:12", 1))
    code, out = run_pins(pins, "check")
    assert code == 1
    assert "is not sha256: and 64 hex digits" in out


@pytest.mark.parametrize("argv", [("refresh", "router"), ("refresh", "none"), ("show", "none"), ("help",)])
def test_pins_that_cannot_be(pins: Path, argv: tuple[str, ...]) -> None:
    code, out = run_pins(pins, *argv)
    assert code == 1
    assert "Traceback" not in out
