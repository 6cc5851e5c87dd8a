"""Packages that vLLM's module of a model imports: missed before a start, and not by a traceback in the log."""

import importlib.metadata
import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from tests.checkpoints import HYBRID, MakeCheckpoint
from thor_spec.config import resolve
from thor_spec.errors import PlatformError
from thor_spec.serve import preflight
from thor_spec.serve.plan import make_plan
from thor_spec.vllm_plugin import compat

NEEDING = [name for name in compat.SERVED if name.startswith("Qwen3_5")]


def installed(monkeypatch: pytest.MonkeyPatch, torch: str, *, torchvision: bool) -> None:
    found = ModuleSpec("torchvision", None) if torchvision else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: torch)


@pytest.mark.parametrize("architecture", compat.SERVED)
@pytest.mark.parametrize("torchvision", [False, True])
def test_who_needs_torchvision(monkeypatch: pytest.MonkeyPatch, architecture: str, torchvision: bool) -> None:
    installed(monkeypatch, "2.13.0+cpu", torchvision=torchvision)
    if torchvision or architecture not in NEEDING:
        preflight.require_packages(architecture)
        return
    with pytest.raises(PlatformError, match="imports torchvision"):
        preflight.require_packages(architecture)


@pytest.mark.parametrize(
    ("torch", "ending"),
    [
        ("2.13.0+cpu", "torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu`."),
        ("2.13.0+cu130", "torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130`."),
        ("2.13.0", "pip install torchvision torch==2.13.0`."),
    ],
)
def test_the_command_is_for_this_torch(monkeypatch: pytest.MonkeyPatch, torch: str, ending: str) -> None:
    installed(monkeypatch, torch, torchvision=False)
    with pytest.raises(PlatformError) as missed:
        preflight.require_packages(NEEDING[0])
    assert str(missed.value).endswith(ending)


def test_a_start_is_refused(make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(architecture: str) -> None:
        raise PlatformError(architecture)

    monkeypatch.setattr(preflight, "require_packages", refuse)
    target = make_checkpoint("q", {**HYBRID, "architectures": [NEEDING[0]]})
    with pytest.raises(PlatformError, match=NEEDING[0]):
        make_plan(resolve({"model": str(target), "draft": "none"}))
