"""What a container is made of: the options of its creation, and specifications that are refused."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from thor_spec.errors import (
    ConfigError,
    PlatformError,
)
from thor_spec.guard import processes
from thor_spec.guard.container_spec import ContainerSpec, Mount
from thor_spec.guard.locks import RESIDENCY, LockDirectory

from .docker_stand_in import IMAGE, SPEC, Contain, Docker


def test_labels_and_options(contain: Contain, docker: Docker, locks: LockDirectory, tmp_path: Path) -> None:
    spec = replace(SPEC, mounts=(Mount(tmp_path), Mount(tmp_path / "docker", writable=True)))
    job = contain(("sleep", "60"), spec=spec, env={"VLLM_PLUGINS": "thor_spec"})
    [call] = docker.calls("create")
    text = " ".join(call)
    assert f"--label thor-spec.job={job.identity.uuid}" in text
    assert f"--label thor-spec.boot={processes.boot_id()}" in text
    assert f"--label thor-spec.locks={locks.path}" in text
    assert "--runtime nvidia" in text
    assert "--network host" in text
    assert "--ipc host" in text
    assert "--env VLLM_PLUGINS=thor_spec" in text
    assert f"type=bind,source={locks.path / RESIDENCY},target=/run/thor-spec/residency,readonly" in text
    assert f"type=bind,source={tmp_path},target={tmp_path},readonly" in text
    assert call[call.index(IMAGE) - 2 : call.index(IMAGE)] == ["--entrypoint", "python3"]
    mounts = [part for part in call if part.startswith("type=bind")]
    assert [part for part in mounts if not part.endswith(",readonly")] == [
        f"type=bind,source={tmp_path / 'docker'},target={tmp_path / 'docker'}"
    ]
    assert not {part.partition("=")[0] for part in call} & {
        "--restart",
        "--pid",
        "--privileged",
        "--rm",
        "-v",
        "--gpus",
    }


def test_the_options_exist_in_docker_itself(tmp_path: Path) -> None:
    program = next(
        (found for found in ("/usr/local/bin/docker", "/usr/bin/docker", "/usr/bin/podman") if os.path.exists(found)),
        None,
    )
    if program is None:
        pytest.skip("not run: neither docker nor podman is installed")
    spec = ContainerSpec(image=IMAGE, mounts=(Mount(tmp_path),), shm_bytes=1 << 30)
    arguments = spec.create_arguments(
        ("x",), labels={"a": "b"}, env={"a": "b"}, name="n", lock_file=tmp_path, group=1, workdir=tmp_path
    )
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20)
    assert "unknown flag" not in done.stderr
    assert "invalid argument" not in done.stderr


@pytest.mark.parametrize("image", ["vllm/vllm-openai", "vllm/vllm-openai:latest", "vllm@sha256:abc", f"{IMAGE} -v /:/"])
def test_a_floating_image_is_refused(image: str) -> None:
    with pytest.raises(PlatformError, match=r"not named by digest.*@sha256"):
        ContainerSpec(image=image)


def test_specifications_that_cannot_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ContainerSpec(image=IMAGE, mounts=(Mount(tmp_path / "absent"),))
    with pytest.raises(ConfigError, match="without a comma"):
        ContainerSpec(image=IMAGE, mounts=(Mount(Path("/a,b")),))
    assert "17 GiB" in ContainerSpec(image=IMAGE, shm_bytes=17 << 30).warnings()[0]
    assert not ContainerSpec(image=IMAGE, shm_bytes=16 << 30).warnings()
    arguments = ContainerSpec(image=IMAGE, shm_bytes=8 << 30, gpu_runtime=None).create_arguments(
        (), labels={}, env={}, name="n", lock_file=tmp_path
    )
    assert "--ipc" not in arguments
    assert "--runtime" not in arguments
    assert arguments[arguments.index("--shm-size") + 1] == str(8 << 30)
