"""Which assembler Triton gets on a Thor: with real ones. Triton brings one that knows it, and one that does not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import HAS_GPU
from thor_spec.bench import dummy
from thor_spec.cli.main import main
from thor_spec.config import resolve
from thor_spec.device import board, ptxas
from thor_spec.device.board import Kind
from thor_spec.doctor import assembler
from thor_spec.doctor.report import Level
from thor_spec.errors import PlatformError
from thor_spec.serve import plan
from thor_spec.tune import search

BLACKWELL = "TRITON_PTXAS_BLACKWELL_PATH"
pytestmark = pytest.mark.skipif(HAS_GPU, reason="not run: that machine has an assembler of CUDA's, too")


@pytest.fixture
def assemblers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """One that knows no Thor, which Triton takes, and one that does, which nobody names."""
    old, new = ptxas.chosen(80), ptxas.chosen(ptxas.THOR)
    assert old is not None
    assert new is not None
    monkeypatch.setattr(ptxas, "_CUDA", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", *ptxas.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(BLACKWELL, str(old))
    return old, new


def cuda(folder: Path, file: Path) -> Path:
    """An installation of CUDA with this assembler."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "ptxas").symlink_to(file)
    return folder


def test_what_triton_takes_stays_where_it_knows_the_board(
    assemblers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ptxas.variables_for(Kind.CUDA) == {}  # not looked at
    assert ptxas.variables_for(Kind.THOR, {BLACKWELL: str(assemblers[1])}) == {}
    monkeypatch.delenv(BLACKWELL)
    assert ptxas.variables_for(Kind.THOR) == {}


def test_another_one_is_found(assemblers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, new = assemblers
    told: list[str] = []
    # Named by the variable that Triton passes over, by CUDA_HOME, on PATH, and where CUDA is by itself.
    assert ptxas.variables_for(Kind.THOR, {"TRITON_PTXAS_PATH": str(new)}, told.append) == dict.fromkeys(
        ptxas.VARIABLES, str(new)
    )
    assert told == [f"note: {assemblers[0]}, which Triton would take, does not know this GPU; it is given {new}."]
    home = cuda(tmp_path / "home", new)
    want = dict.fromkeys(ptxas.VARIABLES, str(home / "bin" / "ptxas"))
    assert ptxas.variables_for(Kind.THOR, {"CUDA_HOME": str(home)}) == want
    with monkeypatch.context() as patched:
        patched.setenv("PATH", f"{home / 'bin'}")
        assert ptxas.variables_for(Kind.THOR) == want
    monkeypatch.setattr(ptxas, "_CUDA", home)
    assert ptxas.variables_for(Kind.THOR) == want


def test_where_none_knows_the_board_nothing_starts(
    assemblers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ptxas, "_CUDA", cuda(tmp_path / "cuda", assemblers[0]))
    with pytest.raises(PlatformError, match=r"does not assemble sm_110a: ptxas fatal .* CUDA 13\.0 or newer\.$"):
        ptxas.variables_for(Kind.THOR)


def test_engines_and_tuners_get_it(
    assemblers: tuple[Path, Path], target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ptxas, "_CUDA", cuda(tmp_path / "cuda", assemblers[1]))
    monkeypatch.setattr(board, "detect", lambda *_: SimpleNamespace(kind=Kind.THOR))
    monkeypatch.setattr(plan, "has_gpu_build", lambda: True)
    want = str(tmp_path / "cuda" / "bin" / "ptxas")
    made = plan.make_plan(resolve({"model": str(target), "draft": "none"}))
    assert {name: made.child_environment()[name] for name in ptxas.VARIABLES} == dict.fromkeys(ptxas.VARIABLES, want)
    seen: list[dict[str, str]] = []

    def popen(_argv: list[str], *, env: dict[str, str], **_: object) -> None:
        seen.append(env)
        raise PlatformError("far enough")

    monkeypatch.setattr(search, "subprocess", SimpleNamespace(Popen=popen, PIPE=None))
    with pytest.raises(SystemExit):
        main(["tune", "moe", str(dummy.make("small", tmp_path)[0]), "--out", str(tmp_path / "out")])
    assert [seen[0][name] for name in ptxas.VARIABLES] == [want] * 3


def test_doctor_says_which_one_triton_takes(
    assemblers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old, new = assemblers
    machine: Any = SimpleNamespace(board=SimpleNamespace(kind=Kind.THOR), gpu=None, live=True)
    monkeypatch.delenv(BLACKWELL)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(old))  # passed over
    found = next(assembler.check(machine))
    assert (found.level, found.detail) == (Level.OK, f"{new} assembles sm_110a")
    monkeypatch.setenv(BLACKWELL, str(old))
    found = next(assembler.check(machine))
    assert found.level is Level.FAIL
    assert found.detail.startswith(f"{old}, which Triton takes, does not assemble sm_110a: ptxas fatal")
    assert found.remedy.startswith(f"Point {', '.join(ptxas.VARIABLES)}, all three, at the ptxas of CUDA 13.0")
    assert "set now: TRITON_PTXAS_PATH, TRITON_PTXAS_BLACKWELL_PATH" in found.remedy
    monkeypatch.setattr(ptxas, "_CUDA", cuda(tmp_path / "cuda", new))
    found = next(assembler.check(machine))
    assert found.level is Level.WARN
    assert found.detail.endswith(f"; thor-spec gives its engines {tmp_path / 'cuda' / 'bin' / 'ptxas'}")
    assert found.remedy.startswith("For other programs: Point ")
