"""What the interpreter lacks."""

import sys
from types import SimpleNamespace

import pytest
import triton
import triton.language as tl

from tests.plugin.runner_kernels.launch import SEAMS


@triton.jit
def log1p_in_double(x):  # noqa: ANN001, ANN201
    return tl.log(1.0 + x.to(tl.float64)).to(tl.float32)


@pytest.fixture(autouse=True)
def log1p(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cannot call the device library's function, and so cannot run the kernel that does."""
    module = sys.modules[SEAMS["_resample_kernel"].resolve().fn.__module__]
    monkeypatch.setattr(module, "tldevice", SimpleNamespace(log1p=log1p_in_double))
