"""What a gate is to those who run several: a look at the candidate, perhaps at references, then a verdict."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from thor_spec.gates import prompts
from thor_spec.gates.verdict import Verdict
from thor_spec.serve.client import Server

SAY_EVERY_S = 10.0
"""How often a gate that takes minutes says how far it is."""


class Paced:
    """Passes a line on now and then, of many that say how far a gate is."""

    def __init__(self, say: Callable[[str], None], *, at_once: bool = False) -> None:
        """``at_once``: the first line too, not only those after ``SAY_EVERY_S``."""
        self._say, self._due = say, time.monotonic() + (0.0 if at_once else SAY_EVERY_S)

    def __call__(self, line: str) -> bool:
        """Return whether it was passed on."""
        if (now := time.monotonic()) < self._due:
            return False
        self._due = now + SAY_EVERY_S
        self._say(line)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How gates ask."""

    count: int = prompts.USUAL
    """Prompts of greedy gates."""
    tokens: int = 64
    """Tokens of each greedy answer."""
    seeds: int = 12
    """Answers drawn from each prompt."""
    conversations: int = 20
    """Over the prefix cache."""
    tie_gap: float | None = None
    """Gap of two logits that counts as a tie; None: from the spread of the logits and the number of layers."""
    control: str = ""
    """A corruption to plant; the gate must turn red."""
    references: tuple[str, ...] = ()
    """Names of the servers that follow the candidate."""
    say: Callable[[str], None] = lambda _: None
    """Hears of progress."""


class Gate(Protocol):
    """One gate. What ``candidate`` returns goes through ``reference``, which may change it, to ``verdict``."""

    name: str
    wants_references: bool
    wants_caching: bool
    """Whether the candidate must cache prefixes, which all other gates do without."""

    def candidate(self, server: Server, options: Options) -> Any:
        """Ask the server that is judged."""

    def reference(self, name: str, server: Server, state: Any, options: Options) -> None:
        """Ask a server that is trusted: ``plain`` speculates not at all, ``stock`` runs without our plugin."""

    def verdict(self, state: Any, options: Options) -> Verdict:
        """Conclude."""
