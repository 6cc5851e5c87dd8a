"""vLLM's snapshot kernel, from an installed vLLM, or from its file alone where the package does not import."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
import triton.language as tl

MODULE = "vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating"
NAME = "fused_sigmoid_gating_delta_rule_update"


def load(*, whole: bool = True) -> tuple[Callable[..., Any] | None, str]:
    """Return the function and where it came from, or None and why not.

    Args:
        whole: try the package first. Its file needs ``vllm.triton_utils`` only, which can stand in for the rest.
    """
    reason = ""
    if whole:
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(MODULE), NAME)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            return found, "the package"
    spec = importlib.util.find_spec("vllm")
    path = Path(spec.origin).parent / (MODULE.removeprefix("vllm.").replace(".", "/") + ".py") if spec and spec.origin else None
    if path is None or not path.is_file():
        return None, reason or "no vLLM here"
    return getattr(_alone(path), NAME), "its file alone"


def _alone(path: Path) -> ModuleType:
    stand_in = ModuleType("vllm.triton_utils")
    stand_in.tl, stand_in.triton = tl, triton  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in ("vllm", "vllm.triton_utils")}
    sys.modules |= {"vllm": ModuleType("vllm"), "vllm.triton_utils": stand_in}
    try:
        spec = importlib.util.spec_from_file_location("fused_sigmoid_gating_alone", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old
    return module
