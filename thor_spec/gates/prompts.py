"""The prompts that gates ask, stored in the package so that a verdict can be repeated."""

import functools
import json
from importlib import resources

COUNT = 60
USUAL = 20
"""How many are asked unless more are wished for; the first ones."""


@functools.cache
def read() -> tuple[str, ...]:
    """Return the prompts, ``COUNT`` of them."""
    return tuple(json.loads(resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8")))
