"""The same tests interpreted on the CPU and, where there is one, on a GPU."""

import math
from typing import Any

import pytest
import torch

from tests.conftest import HAS_GPU


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="not run: kernels are compiled for the GPU here")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh float buffers start as NaN, so a lane that a kernel forgot fails the test."""
    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(place, name)

        def poisoned(*args: Any, make: Any = make, **kw: Any) -> torch.Tensor:
            out: torch.Tensor = make(*args, **kw)
            return out.fill_(math.nan) if out.is_floating_point() else out

        monkeypatch.setattr(place, name, poisoned)
