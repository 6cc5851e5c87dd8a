"""Rotary frequencies and tables in double precision: what a served model's cache is compared with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thor_spec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Frequencies:
    """The angle of pair ``i`` at position ``m`` is ``m * inverse[i]``; cosine and sine are multiplied by ``scale``."""

    inverse: tuple[float, ...]
    scale: float = 1.0


def default(rotary_dim: int, theta: float) -> Frequencies:
    """Return the unscaled frequencies ``theta ** (-2 i / rotary_dim)``, one per rotated pair (arXiv:2104.09864)."""
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ConfigError(f"rotary_dim={rotary_dim} must be positive and even: dimensions are rotated in pairs.")
    return Frequencies(inverse=tuple(theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)))


def linear(rotary_dim: int, theta: float, factor: float) -> Frequencies:
    """Return the frequencies of positions divided by ``factor``."""
    _require_factor(factor)
    return Frequencies(inverse=tuple(f / factor for f in default(rotary_dim, theta).inverse))


def yarn(
    rotary_dim: int, theta: float, factor: float, native: int, *, fast: float = 32.0, slow: float = 1.0
) -> Frequencies:
    """Return YaRN's frequencies (arXiv:2309.00071).

    Pairs that turn more than ``fast`` times within the ``native`` context keep their frequency, those that turn less
    than ``slow`` times are divided by ``factor``, and those between are blended.
    """
    _require_factor(factor)
    if native <= 0:
        raise ConfigError(f"native={native} must be the model's own context in tokens.")
    low = max(math.floor(_pair_turning(fast, rotary_dim, theta, native)), 0)
    high = min(math.ceil(_pair_turning(slow, rotary_dim, theta, native)), rotary_dim - 1)
    inverse = []
    for i, frequency in enumerate(default(rotary_dim, theta).inverse):
        ramp = min(max((i - low) / (high - low or 0.001), 0.0), 1.0)
        inverse.append((1 - ramp) * frequency + ramp * frequency / factor)
    return Frequencies(inverse=tuple(inverse), scale=0.1 * math.log(factor) + 1.0)


def longrope(rotary_dim: int, theta: float, factor: float, native: int, rescale: Sequence[float]) -> Frequencies:
    """Return LongRoPE's frequencies (arXiv:2402.13753): each pair's is divided by its own number in ``rescale``.

    Raises: ConfigError, if ``rescale`` has not one positive number for each of the ``rotary_dim / 2`` pairs.
    """
    _require_factor(factor)
    plain = default(rotary_dim, theta).inverse
    if len(rescale) != len(plain):
        raise ConfigError(
            f"A list of {len(rescale)} LongRoPE factors does not fit: {len(plain)} pairs are rotated (rotary_dim "
            f"{rotary_dim}). Take the list that was made for this model."
        )
    if min(rescale) <= 0:
        raise ConfigError(f"LongRoPE factors must be positive; the least is {min(rescale):g}.")
    scale = math.sqrt(1 + math.log(factor) / math.log(native)) if factor > 1 else 1.0
    return Frequencies(inverse=tuple(f / r for f, r in zip(plain, rescale, strict=True)), scale=scale)


def stepped(rotary_dim: int, theta: float, factor: float, native: int) -> tuple[float, ...]:
    """Return LongRoPE factors for a model without searched ones: ``factor`` for pairs that never turn fully, else 1.

    A pair is stretched if one turn of it takes more than the ``native`` context, so training has not shown it all.
    """
    first = math.ceil(_pair_turning(1.0, rotary_dim, theta, native))
    return tuple(1.0 if i < first else factor for i in range(rotary_dim // 2))


def row(frequencies: Frequencies, position: int) -> tuple[float, ...]:
    """Return one row of a cosine-sine cache: the cosines of all pairs, then the sines."""
    angles = [position * f for f in frequencies.inverse]
    functions: tuple[Callable[[float], float], ...] = (math.cos, math.sin)
    return tuple(frequencies.scale * function(angle) for function in functions for angle in angles)


def _pair_turning(times: float, rotary_dim: int, theta: float, native: int) -> float:
    """Return the index, as a real number, of the pair that turns ``times`` within ``native`` positions."""
    return rotary_dim * math.log(native / (2 * math.pi * times)) / (2 * math.log(theta))


def _require_factor(factor: float) -> None:
    if factor < 1:
        raise ConfigError(f"factor={factor} must be at least 1: it stretches the native context.")
