"""The doctor on a Thor's files, on this machine, in a container's files, and over logs: line by line."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HAS_GPU
from tests.thor_tree import FIXTURES, fixture, make_thor
from thor_spec.cli.main import main
from thor_spec.device import machine as machines
from thor_spec.device.board import Kind, detect
from thor_spec.device.cuda import Gpu
from thor_spec.device.machine import Machine
from thor_spec.device.power import PowerMode
from thor_spec.device.torch_build import TorchBuild
from thor_spec.doctor import archs, board, container, memory, overlay
from thor_spec.doctor.report import Check, Level

GOLDEN = Path(__file__).parents[1] / "golden"
DIGEST = "@sha256:" + "0" * 64
H200 = Gpu(name="NVIDIA H200", capability=(9, 0), count=1, total_bytes=139 << 30, cuda=(13, 0))


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THOR_SPEC_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("VLLM_FLASH_ATTN_VERSION", raising=False)


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *argv, "--json"])
    code = ended.value.code
    return code if isinstance(code, int) else 0, json.loads(capsys.readouterr().out)


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("thor", {}),
        ("thor_full_cache", {"memory": "pagecache_full"}),
        ("thor_low", {"memory": "low", "release": "r39_2_0"}),
        ("thor_r38_2", {"release": "r38_2_0"}),
    ],
)
def test_the_fixture_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, changes: dict[str, str]
) -> None:
    code, report = call(capsys, "--root", str(make_thor(tmp_path / "thor", **changes)))
    assert report == golden(f"doctor_{name}.json")
    assert code == 0


def masked(report: Any) -> list[list[str]]:
    """Return name, level and detail of each check, without numbers and folders; seams have tests of their own."""
    found = []
    for check in report["checks"]:
        if check["name"] not in ("seam", "kernels", "torchvision"):
            detail = re.sub(r"(^|[ (])/[^ ]*/", r"\1", check["detail"].split(" (/")[0])
            found.append([check["name"], check["level"], re.sub(r"\d+(\.\d+)*(\+cpu)?", "N", detail)])
    return found


@pytest.mark.skipif(HAS_GPU, reason="not run: this is for machines without a GPU")
def test_this_machine_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = call(capsys)
    assert masked(report) == golden("doctor_cpu.json")
    assert code == 0


@pytest.mark.gpu
def test_a_gpu_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Line by line on the host that the file was read from, with vLLM 0.33; level by level on others."""
    code, report = call(capsys)
    assert code == 0, report
    lines, known = masked(report), golden("doctor_h200.json")
    if "H200" in str(report):
        assert lines == known
    else:
        levels = {name: level for name, level, _ in lines}
        assert all(levels[name] == level for name, level, _ in known if name in levels and level == "ok")


def level_of(checks: list[Check], name: str) -> tuple[Level, str]:
    found = next(check for check in checks if check.name == name)
    assert bool(found.remedy) is (found.level is not Level.OK), found
    return found.level, found.detail


def thor(tmp_path: Path, **changes: Any) -> Machine:
    return replace(machines.look(make_thor(tmp_path / "tree")), **changes)


@pytest.mark.parametrize(
    ("change", "name", "level", "says"),
    [
        ({"mode": PowerMode("MAXN", 0)}, "power mode", Level.OK, "GPU up to 1575 MHz"),
        ({"mode": PowerMode("70W", 3)}, "power mode", Level.WARN, "70W"),
        ({"mode": PowerMode("CUSTOM", 9)}, "power mode", Level.OK, "CUSTOM"),
        ({"mode": None}, "power mode", Level.WARN, "does not answer"),
        ({"torch": TorchBuild(cuda="14.0")}, "driver", Level.FAIL, "torch is built for CUDA 14.0"),
        ({"torch": TorchBuild(cuda="13.2")}, "driver", Level.WARN, "torch is built for CUDA 13.2"),
    ],
)
def test_the_board_s_lines(tmp_path: Path, change: dict[str, Any], name: str, level: Level, says: str) -> None:
    found = level_of(list(board.check(thor(tmp_path, **change))), name)
    assert found[0] is level
    assert says in found[1]


def test_an_old_system_and_an_old_driver(tmp_path: Path) -> None:
    machine = thor(tmp_path)
    old = replace(machine.board, release=machine.board.release._replace(major=36))  # type: ignore[union-attr]
    assert level_of(list(board.check(replace(machine, board=old))), "l4t")[0] is Level.FAIL
    gpu = replace(H200, cuda=(12, 6))
    assert level_of(list(board.check(replace(machine, gpu=gpu))), "driver")[0] is Level.FAIL


def test_heat_and_calm(tmp_path: Path) -> None:
    machine = thor(tmp_path)
    hot = replace(machine.sensors, celsius={"tj": 108.9})
    assert level_of(list(board.check(replace(machine, sensors=hot))), "heat")[0] is Level.WARN
    calm = replace(machine.sensors, throttled={"gpu": False}, gpu_cooling=(0, 169), over_current_events=0)
    checks = list(board.check(replace(machine, sensors=calm)))
    assert level_of(checks, "throttling") == (Level.OK, "none, clock limit 0 of 169")
    assert "over-current" not in {check.name for check in checks}


def test_a_gpu_of_its_own_needs_no_page_cache_advice(tmp_path: Path) -> None:
    machine = thor(tmp_path)
    beside = replace(machine, board=replace(machine.board, kind=Kind.CUDA))
    assert [check.name for check in memory.check(beside)] == ["memory"]


def test_torch_for_other_gpus(tmp_path: Path) -> None:
    machine = thor(tmp_path, torch=TorchBuild(archs=("sm_80", "sm_120"), capability=(11, 0)))
    (found,) = archs.check(machine)
    assert found.level is Level.FAIL
    assert "TORCH_CUDA_ARCH_LIST=11.0a" in found.remedy


def test_extensions_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "cuobjdump"
    tool.write_text(
        '#!/bin/sh\n[ "$1" = --list-elf ] && echo "ELF file 1: a.1.sm_90.cubin" || echo "PTX file 1: a.1.sm_80.ptx"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setattr(archs, "cuobjdump", lambda: str(tool))
    monkeypatch.setattr(archs, "extensions", lambda: [Path("_C.abi3.so")])
    assert archs.list_archs(str(tool), Path("x")) == ("compute_80", "sm_90")
    machine = thor(tmp_path, live=True)
    assert [check.level for check in archs.check(machine)] == [Level.OK, Level.OK]  # by its PTX
    tool.write_text("#!/bin/sh\necho 'ELF file 1: a.1.sm_90.cubin'\n")
    failed = [check for check in archs.check(machine) if check.name == "extensions"]
    assert failed[0].level is Level.OK  # --list-ptx says compute_90 here
    tool.write_text('#!/bin/sh\n[ "$1" = --list-elf ] && echo "a.sm_90a.cubin"\n')
    failed = [check for check in archs.check(machine) if check.name == "extensions"]
    assert (failed[0].level, failed[0].detail) == (Level.FAIL, "_C.abi3.so: sm_90a")
    tool.write_text("#!/bin/sh\nexit 255\n")  # older than the library
    unread = [check for check in archs.check(machine) if check.name == "extensions"]
    assert (unread[0].level, unread[0].detail) == (
        Level.WARN, f"{tool} cannot read _C.abi3.so, so nobody knows which GPUs it is for",
    )  # fmt: skip
    tool.write_text('#!/bin/sh\n[ "$1" = --list-elf ] && echo "a.sm_90a.cubin"\n')
    monkeypatch.setattr(archs, "extensions", lambda: [Path("_qutlass_C.abi3.so")])
    (spare,) = (check for check in archs.check(machine) if check.name == "extensions")
    assert spare.level is Level.OK
    assert "no MXFP4 and NVFP4 products of Qutlass on this GPU" in spare.detail


@pytest.mark.skipif(archs.cuobjdump() is None, reason="not run: no cuobjdump")
def test_a_library_without_gpu_code_is_left_alone() -> None:
    tool = archs.cuobjdump()
    assert tool is not None
    assert archs.list_archs(tool, Path(sys.executable).resolve()) == ()


def test_a_log_s_cause_and_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = call(capsys, "--log", str(FIXTURES / "vllm_logs_thor.txt"))
    assert code == 13
    cause, *also = report["checks"]
    assert cause["detail"].startswith("ptxas fatal")  # the first odd line of the file
    assert "TRITON_PTXAS_BLACKWELL_PATH" in cause["remedy"]
    assert {check["level"] for check in also} == {"warn", "fail"}
    good = tmp_path / "good.log"
    good.write_text(fixture("vllm_logs_thor.txt").split("# --- untuned")[0])
    assert call(capsys, "--log", str(good)) == (
        0,
        {"schema": 1, "checks": [{"name": "cause", "level": "ok", "detail": "no error in this log", "remedy": ""}]},
    )
    good.write_text("RuntimeError: never seen before\n")
    assert "Not a known one" in call(capsys, "--log", str(good))[1]["checks"][0]["remedy"]


def test_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--image", f"vllm/vllm-openai{DIGEST}")[0] == 0
    code, report = call(capsys, "--image", "ghcr.io/nvidia-ai-iot/vllm:latest-jetson-thor")
    assert code == 13
    assert [check["level"] for check in report["checks"]] == ["fail", "fail"]
    assert "serves garbage" in report["checks"][1]["detail"]


def test_an_image_of_another_line_of_boards() -> None:
    from thor_spec.doctor import combinations

    here = detect(Path("/"), None)
    facts = combinations.facts(here, image=f"dustynv/vllm:0.8.6-r36.4.0-cu128{DIGEST}")
    assert (facts["image_l4t"], facts["digest"]) == (36, DIGEST[1:])
    assert [check.level for check in combinations.check({**facts, "board": "thor"})] == [Level.FAIL]
    assert "image_l4t" not in combinations.facts(here, image="vllm/vllm-openai:v0.33.0")


def test_fa3_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_FLASH_ATTN_VERSION", "3")
    code, report = call(capsys, "--root", str(make_thor(tmp_path / "thor")))
    assert code == 13
    assert [check["detail"][:4] for check in report["checks"] if check["name"] == "known"] == ["fa3:"]


def test_outside_an_image_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = call(capsys, "--container")
    assert code == 13
    assert report["checks"][0]["detail"].startswith(f"{overlay.MANIFEST} is missing")


def test_options_that_exclude_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for argv in (["--log", "x", "--container"], ["--root", str(tmp_path / "none")], ["--log", "/nowhere/x"]):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *argv])
        assert ended.value.code == 2
    assert "exclude each other" in capsys.readouterr().err


@pytest.fixture
def image(tmp_path: Path) -> tuple[Path, Path]:
    """A base's packages, and the manifest that the bare Python of a base would write."""
    packages = tmp_path / "site-packages"
    for name in ("vllm/a.py", "vllm/b.py", "torch/__init__.py", "thor_spec/x.py"):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(name)
    manifest = tmp_path / "out" / "base.json"
    script = Path(shutil.copy(overlay.__file__, tmp_path / "overlay.py"))
    argv = [
        sys.executable,
        "-I",
        "-S",
        str(script),
        "record",
        str(manifest),
        f"vllm/vllm-openai{DIGEST}",
        str(packages),
    ]
    subprocess.run(argv, check=True)
    return packages, manifest


def test_an_untouched_overlay(image: tuple[Path, Path]) -> None:
    packages, manifest = image
    (packages / "thor_spec" / "y.py").write_text("ours")
    (packages / "vllm" / "__pycache__").mkdir()
    (packages / "vllm" / "__pycache__" / "a.pyc").write_text("made by running it")
    assert [(check.name, check.level) for check in container.check_overlay(manifest)] == [
        ("image", Level.OK),
        ("overlay", Level.OK),
    ]


def test_a_changed_overlay_names_the_files(image: tuple[Path, Path]) -> None:
    packages, manifest = image
    (packages / "vllm" / "a.py").write_text("patched")
    (packages / "vllm" / "b.py").unlink()
    (packages / "extra.py").write_text("new")
    details = {check.detail for check in container.check_overlay(manifest) if check.name == "overlay"}
    assert details == {
        f"1 files changed: {packages}/vllm/a.py",
        f"1 files removed: {packages}/vllm/b.py",
        f"1 files added: {packages}/extra.py",
    }


@pytest.mark.parametrize(
    ("text", "says"), [(None, "is missing"), ("{", "malformed"), ("{}", "malformed"), ("[]", "malformed")]
)
def test_no_manifest(tmp_path: Path, text: str | None, says: str) -> None:
    if text is not None:
        (tmp_path / "base.json").write_text(text)
    (found,) = container.check_overlay(tmp_path / "base.json")
    assert found.level is Level.FAIL
    assert says in found.detail


def test_inside_a_container(tmp_path: Path, image: tuple[Path, Path]) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    line = "1 0 0:1 / / {} - overlay overlay {}\n"
    (tmp_path / "proc/self/mountinfo").write_text(line.format("ro,relatime", "rw"))
    report = container.examine(image[1], tmp_path)
    levels = {check.name: check.level for check in report.checks}
    assert levels["root"] is Level.OK
    assert levels["residency"] is Level.FAIL
    assert levels["user"] is (Level.WARN if os.getuid() == 0 else Level.OK)
    (tmp_path / "run/thor-spec").mkdir(parents=True)
    (tmp_path / "run/thor-spec/residency").touch()
    (tmp_path / "proc/self/mountinfo").write_text(line.format("rw,relatime", "rw"))
    levels = {check.name: check.level for check in container.examine(image[1], tmp_path).checks}
    assert (levels["root"], levels["residency"]) == (Level.WARN, Level.OK)
