"""vLLM's snapshot kernel, from its file alone."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
import triton.language as tl

FILE = "third_party/flash_linear_attention/ops/fused_sigmoid_gating.py"
NAME = "fused_sigmoid_gating_delta_rule_update"


def load() -> tuple[Callable[..., Any] | None, str]:
    """Return the function and where it came from, or None and why not.

    The kernel's file needs ``vllm.triton_utils`` only, and that only for Triton itself. So the package, whose
    extensions may not load here, is not imported.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None, "not present: no vLLM here"
    path = Path(spec.origin).parent / FILE
    if not path.is_file():
        return None, f"not present: this vLLM has no {FILE}"
    return getattr(_alone(path), NAME), f"vLLM's {FILE}"


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
