"""Whether the running server's prefix cache can be of use to those who ask it."""

from collections.abc import Iterator

from thor_spec.doctor.report import Check, Level
from thor_spec.vllm_plugin.reasons import Told

_FEW = 20  # requests, before which nothing is concluded
_TOO_MANY = 0.5


def check(told: Told | None) -> Iterator[Check]:
    """Check what a server tells of its requests; nothing where none answers or it caches nothing."""
    if told is None or not told.block:
        return
    short, all_ = told.counts["short"][0], told.requests
    bad = all_ >= _FEW and short > _TOO_MANY * all_
    reused = f"{told.share:.0%} of {all_} requests' tokens were reused, in blocks of {told.block} tokens"
    yield Check(
        name="prefix cache",
        level=Level.WARN if bad else Level.OK,
        detail=f"{short} of {all_} requests are shorter than a block of {told.block} tokens" if bad else reused,
        remedy="Nothing of them can be reused. A smaller block: docs/prefix_cache.md, or serve without caching."
        if bad
        else "",
    )
