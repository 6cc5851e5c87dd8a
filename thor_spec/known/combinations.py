"""Combinations of versions, builds and options that are known not to work."""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

Facts = Mapping[str, Any]
"""What is so here, by the names that the data file uses. A fact that is not known is absent."""

_COMPARISONS = ("<", ">", "=", "!", "~")
_L4T_TAG = re.compile(r"[:-]r(\d{2})(?:\.\d+)*\b", re.ASCII)  # 0.8.6-r36.4.0-cu128


class Combination(NamedTuple):
    """One combination. ``refuse``: a start would fail, or answer wrongly."""

    name: str
    when: tuple[tuple[str, Any], ...]
    refuse: bool
    result: str
    remedy: str
    confidence: str
    sources: tuple[str, ...]

    def matches(self, facts: Facts) -> bool:
        """Return whether every condition is known to hold."""
        return all(name in facts and holds(wanted, facts[name]) for name, wanted in self.when)

    def describe(self) -> str:
        """Return what happens, and who says so."""
        return f"{self.result} ({self.confidence.replace('one', 'one source')}: {', '.join(self.sources)})"


@functools.cache
def table() -> tuple[Combination, ...]:
    """Return all known combinations."""
    content = json.loads(Path(__file__).with_name("combinations.json").read_text(encoding="utf-8"))
    return tuple(
        Combination(
            entry["name"],
            tuple(entry["when"].items()),
            entry["refuse"],
            entry["result"],
            entry["remedy"],
            entry["confidence"],
            tuple(entry["sources"]),
        )
        for entry in content["combinations"]
    )


def matching(facts: Facts) -> tuple[Combination, ...]:
    """Return the combinations that are at hand."""
    return tuple(combination for combination in table() if combination.matches(facts))


def of_image(image: str) -> dict[str, Any]:
    """Return what an image's name tells: its digest, or else its tag, and the line of boards that r36.4.0 is for."""
    name, at, digest = image.partition("@")
    line = _L4T_TAG.search(name)
    return {**({"digest": digest} if at else {"image": name}), **({"image_l4t": int(line[1])} if line else {})}


def holds(wanted: Any, fact: Any) -> bool:
    """Return whether a fact satisfies a condition: one of a list, a version or number in a range, or the same value."""
    if isinstance(wanted, list):
        return fact in wanted
    if isinstance(wanted, str) and wanted.startswith(_COMPARISONS):
        try:
            return SpecifierSet(wanted, prereleases=True).contains(Version(str(fact)))
        except (InvalidSpecifier, InvalidVersion):
            return False
    return type(wanted) is type(fact) and bool(wanted == fact)
