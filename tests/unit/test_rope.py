"""Against transformers' own tables, and against the closed form's fixed points."""

import math

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from thor_spec.errors import ConfigError
from thor_spec.rope import tables

CASES = [(64, 1e7, 262144), (128, 1e6, 40960), (32, 1e4, 2048)]


def theirs(kind: str, dim: int, theta: float, native: int, factor: float) -> tuple[list[float], float]:
    parameters = {"rope_type": kind, "rope_theta": theta, "factor": factor, "original_max_position_embeddings": native}
    config = Qwen3Config(
        head_dim=dim, max_position_embeddings=int(native * factor), rope_parameters=parameters, num_attention_heads=1
    )
    inverse, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inverse.double().tolist(), scale


@pytest.mark.parametrize(("dim", "theta", "native"), CASES)
@pytest.mark.parametrize("factor", [2.0, 4.0, 8.0])
@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_scaled_frequencies_equal_transformers(kind: str, dim: int, theta: float, native: int, factor: float) -> None:
    ours = tables.yarn(dim, theta, factor, native) if kind == "yarn" else tables.linear(dim, theta, factor)
    inverse, scale = theirs(kind, dim, theta, native, factor)
    assert ours.inverse == pytest.approx(inverse, rel=1e-6)
    assert ours.scale == pytest.approx(scale, abs=1e-12)


@pytest.mark.parametrize(("dim", "theta", "native"), CASES)
def test_yarn_leaves_fast_pairs_and_divides_slow_ones(dim: int, theta: float, native: int) -> None:
    plain, scaled = tables.default(dim, theta), tables.yarn(dim, theta, 4.0, native)
    assert scaled.inverse[0] == plain.inverse[0] == 1.0
    assert scaled.inverse[-1] == pytest.approx(plain.inverse[-1] / 4)
    ratios = [p / s for p, s in zip(plain.inverse, scaled.inverse, strict=True)]
    assert ratios == sorted(ratios)


def test_the_scale_at_four_times_the_context() -> None:
    assert tables.yarn(64, 1e7, 4.0, 262144).scale == pytest.approx(1.1386, abs=1e-4)


def test_a_row_is_cosines_then_sines() -> None:
    frequencies = tables.default(4, 100.0)
    assert frequencies.inverse == pytest.approx((1.0, 0.1))
    assert tables.row(frequencies, 3) == pytest.approx((math.cos(3), math.cos(0.3), math.sin(3), math.sin(0.3)))


@pytest.mark.parametrize("call", [lambda: tables.default(3, 1e4), lambda: tables.linear(4, 1e4, 0.5)])
def test_bad_input(call: object) -> None:
    with pytest.raises(ConfigError):
        call()  # type: ignore[operator]


def test_unknown_native_context() -> None:
    with pytest.raises(ConfigError, match="own context"):
        tables.yarn(64, 1e4, 2.0, 0)
