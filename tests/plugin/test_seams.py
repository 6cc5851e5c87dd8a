"""The places in vLLM that we rely on: they are where we think, and the check notices when they move."""

import dataclasses
import gc
import inspect
import re
from pathlib import Path

import pytest

import thor_spec
from thor_spec.errors import PlatformError, SeamMovedError
from thor_spec.vllm_plugin import activation, compat, models, receipt, seam
from thor_spec.vllm_plugin.seam import Seam

SEAMS = tuple(compat.problems())
LIGHT = tuple(s for s in SEAMS if "qwen3_5" not in s.target)  # importing Qwen3.5 needs torchvision


@pytest.mark.parametrize("place", SEAMS, ids=lambda s: s.target)
def test_seam_holds_in_the_installed_vllm(place: Seam) -> None:
    assert place.problem() is None


@pytest.mark.parametrize("place", LIGHT, ids=lambda s: s.target)
def test_reading_agrees_with_importing(place: Seam) -> None:
    found = place.resolve()
    if place.signature is None:
        return
    if inspect.isclass(found):
        found = found.__init__
    found = getattr(found, "__func__", found)  # a class method shows its first parameter as well
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(inspect.unwrap(getattr(found, "stock", found))).parameters.values()
    imported = [f"{kinds.get(p.kind, '')}{p.name}" for p in parameters]
    assert imported == [name for name in place.signature if name != "*"]


@pytest.mark.parametrize("place", [s for s in SEAMS if s.signature], ids=lambda s: s.target)
def test_a_changed_signature_is_noticed(place: Seam) -> None:
    assert place.signature
    for changed in (place.signature[:-1], (*place.signature, "more"), ("other", *place.signature[1:])):
        problem = dataclasses.replace(place, signature=changed).problem()
        assert problem
        assert "0.32.0 and 0.33.0" in problem
        assert place.why in problem


@pytest.mark.parametrize("target", ["vllm.no.such:thing", "vllm.plugins:nothing", "no_such_package:x"])
def test_a_moved_target_is_noticed(target: str) -> None:
    gone = Seam(target=target, signature=None, why="test", drop_when="never")
    assert "gone" in (gone.problem() or "") or "not installed" in (gone.problem() or "")
    with pytest.raises(SeamMovedError):
        gone.resolve()


@pytest.mark.parametrize(("found", "fits"), [("0.31.9", False), ("0.32.1", True), ("0.33.0", True), ("0.34.0", False)])
def test_version_range(monkeypatch: pytest.MonkeyPatch, found: str, fits: bool) -> None:
    monkeypatch.setattr(seam, "version", lambda: found)
    if fits:
        assert seam.require_supported_version() == found
    else:
        with pytest.raises(PlatformError, match=r">=0\.32,<0\.34"):
            seam.require_supported_version()


def test_a_moved_seam_stops_activation_before_anything_is_registered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("THOR_SPEC_RECEIPTS", str(tmp_path))
    moved = dataclasses.replace(compat.REGISTER_MODEL, signature=("self", "model_arch"))
    monkeypatch.setattr(compat.runner, "REGISTER_MODEL", moved)
    registry = compat.MODEL_REGISTRY.resolve()
    before = dict(registry.models)
    with pytest.raises(SeamMovedError, match="register_model takes"):
        activation.activate()
    assert registry.models == before
    (left,) = receipt.collect(tmp_path)
    assert (left.state, left.exit_code) == ("failed", 13)


def test_activation_registers_every_target_and_may_run_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("THOR_SPEC_RECEIPTS", str(tmp_path))
    registry = compat.MODEL_REGISTRY.resolve()
    gc.disable()  # as the server's module leaves it
    try:
        for _ in range(2):
            activation.activate()
        assert gc.isenabled()
    finally:
        gc.enable()
    for architecture in compat.TARGETS:
        assert registry.models[architecture].module_name == models.__name__
    assert [r.state for r in receipt.collect(tmp_path)] == ["active"]


def test_vllm_still_asks_the_model_for_its_state() -> None:
    ours = models.Qwen3NextForCausalLM
    resolved = compat.RESOLVE_MODEL_STATE.resolve()(None, ours.__new__(ours))
    assert resolved.__name__ == "ThorHybridModelState"
    dense = models.Qwen3ForCausalLM
    assert compat.RESOLVE_MODEL_STATE.resolve()(None, dense.__new__(dense)).__name__ == "ThorModelState"


def test_only_the_seams_reach_vllm() -> None:
    """The linter sees import statements; this sees the names in importlib calls and strings."""
    package = Path(thor_spec.__file__).parent
    rooms = ("compat", "runner_kernels")  # the latter name what they replace
    allowed = {package / "vllm_plugin" / "seam.py"}.union(*((package / "vllm_plugin" / r).glob("*.py") for r in rooms))
    pattern = re.compile(r"""["']vllm\.(?!general_plugins)[a-z_.]+|import_module\(""")
    offenders = [
        f"{path.relative_to(package)}: {found.group()}"
        for path in package.rglob("*.py")
        if path not in allowed
        for found in pattern.finditer(path.read_text())
    ]
    assert offenders == []
