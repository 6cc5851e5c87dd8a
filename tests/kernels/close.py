"""How close is close: relative RMS, one budget."""

import torch

BUDGET = 1e-5
"""For float32 accumulation, whatever the inputs' dtype: bfloat16 inputs and their products are exact in float32."""


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def assert_close(
    name: str, want: torch.Tensor, got: torch.Tensor, budget: float = BUDGET, floor: float = 1e-30
) -> None:
    """Args: floor: the least size that an error is relative to."""
    want, got = want.cpu(), got.cpu()
    assert want.shape == got.shape, f"{name}: {tuple(got.shape)}, not {tuple(want.shape)}"
    assert want.isfinite().all(), f"{name}: the reference itself is not finite"
    assert got.isfinite().all(), f"{name}: NaN or Inf; did the kernel skip a lane?"
    error = rms(got.double() - want.double()) / max(rms(want), floor)
    assert error <= budget, f"{name}: relative RMS {error:.1e} > {budget:.0e}"


def assert_same_bits(name: str, want: torch.Tensor, got: torch.Tensor) -> None:
    want, got = want.cpu(), got.cpu()
    assert (want.dtype, want.shape) == (got.dtype, got.shape), f"{name}: {got.dtype} {tuple(got.shape)}"
    as_integers = {4: torch.int32, 2: torch.int16, 8: torch.int64}[want.element_size()]
    differing = int((want.contiguous().view(as_integers) != got.contiguous().view(as_integers)).sum())
    assert differing == 0, f"{name}: {differing} of {want.numel()} differ"
