"""How sure a share of hits is (Wilson, 1927)."""

import math
from statistics import NormalDist
from typing import NamedTuple

from thor_spec.errors import ConfigError


class Interval(NamedTuple):
    """Bounds of a share, both in 0..1."""

    low: float
    high: float


def interval(hits: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """Return Wilson's interval of the share ``hits / trials``; unlike the plain one it holds for few and for all.

    Raises: ConfigError, without a trial or with more hits than trials.
    """
    if not 0 <= hits <= trials or trials == 0:
        raise ConfigError(f"{hits} hits of {trials} are no share.")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, square = hits / trials, z * z
    middle = share + square / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    # All misses and all hits reach their end exactly; rounding would leave a crumb.
    low = 0.0 if hits == 0 else (middle - spread) / (1 + square / trials)
    high = 1.0 if hits == trials else (middle + spread) / (1 + square / trials)
    return Interval(low, high)
