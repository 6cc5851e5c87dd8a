"""The chunked gated delta rule against the recurrence, and the convolution against torch's."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from thor_spec.train import delta


def inputs(tokens: int, *, correlated: bool, heads: int = 3, key: int = 16, value: int = 24) -> list[Tensor]:
    """Return q, k, v, log decay, beta and state; correlated keys make the triangular system ill-behaved."""
    torch.manual_seed(tokens)
    common = torch.randn(1, 1, heads, key, dtype=torch.float64) * (2.0 if correlated else 0.0)
    q, k = (torch.randn(2, tokens, heads, key, dtype=torch.float64) + common for _ in range(2))
    decay = -torch.rand(2, tokens, heads, dtype=torch.float64) * torch.tensor([1e-3, 0.1, 20.0], dtype=torch.float64)
    drawn = [
        functional.normalize(q, dim=-1) * key**-0.5,
        functional.normalize(k, dim=-1),
        torch.randn(2, tokens, heads, value, dtype=torch.float64),
        decay,
        torch.rand(2, tokens, heads, dtype=torch.float64),
        torch.randn(2, heads, key, value, dtype=torch.float64),
    ]
    return [tensor.requires_grad_() for tensor in drawn]


def relative(want: Tensor, got: Tensor) -> float:
    return ((want - got).norm() / want.norm()).item()


@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 64), (64, 64), (65, 64), (150, 64), (96, 32), (40, 16)])
def test_chunks_are_the_recurrence(tokens: int, chunk: int, correlated: bool) -> None:
    drawn = inputs(tokens, correlated=correlated)
    want, got = delta.recurrent(*drawn), delta.chunked(*drawn, chunk=chunk)
    weights = [torch.randn_like(tensor) for tensor in want]
    gradients = [
        torch.autograd.grad(sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True)), drawn)
        for outs in (want, got)
    ]
    for name, a, b in zip(("out", "state"), want, got, strict=True):
        assert relative(a, b) < 1e-13, name
    for name, a, b in zip(("q", "k", "v", "decay", "beta", "state"), *gradients, strict=True):
        assert relative(a, b) < 1e-11, name


def test_the_state_may_be_ignored() -> None:
    drawn = inputs(70, correlated=False)
    got = torch.autograd.grad(delta.chunked(*drawn)[0].sum(), drawn)
    want = torch.autograd.grad(delta.recurrent(*drawn)[0].sum(), drawn)
    assert all(relative(a, b) < 1e-11 for a, b in zip(want, got, strict=True))


def test_single_precision_is_enough_for_training() -> None:
    drawn = inputs(256, correlated=True)
    want = delta.recurrent(*drawn)[0]
    got = delta.chunked(*(tensor.float() for tensor in drawn))[0]
    assert relative(want, got.double()) < 2e-6


def test_a_sequence_may_be_cut_anywhere() -> None:
    *drawn, state = inputs(130, correlated=False)
    whole, last = delta.chunked(*drawn, state)
    first, between = delta.chunked(*(tensor[:, :77] for tensor in drawn), state)
    second, end = delta.chunked(*(tensor[:, 77:] for tensor in drawn), between)
    assert relative(whole, torch.cat([first, second], dim=1)) < 1e-13
    assert relative(last, end) < 1e-13


def test_the_operators_are_well_formed() -> None:
    torch.manual_seed(0)
    shapes = [(2, 3, 4, 6), (2, 3, 4, 5), (2, 3, 4, 5), (2, 3), (2, 5, 6)]
    arguments = tuple(torch.rand(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    torch.library.opcheck(delta.scan, arguments)


def test_the_convolution_is_torchs() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 9, 6), torch.randn(6, 4)
    want = functional.silu(functional.conv1d(functional.pad(x.mT, (3, 0)), weight[:, None], groups=6).mT)
    assert torch.allclose(delta.convolve(x, weight), want, atol=1e-6)
    assert torch.allclose(delta.convolve(x[:, 5:], weight, x[:, 2:5]), want[:, 5:], atol=1e-6)
