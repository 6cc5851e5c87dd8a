"""Gates over servers: running ones, by their addresses, or engines that are started for it, one after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thor_spec.errors import ConfigError
from thor_spec.gates.gate import Gate, Options
from thor_spec.gates.verdict import Verdict
from thor_spec.serve.client import Server
from thor_spec.serve.events import Events
from thor_spec.serve.metrics import cache_config
from thor_spec.serve.plan import Plan
from thor_spec.serve.session import while_served


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is judged, and against what."""

    candidate: "Running | Planned"
    references: Mapping[str, "Running | Planned | Derived"]


@dataclass(frozen=True, slots=True)
class Running:
    """A server that somebody else runs."""

    url: str

    def visit(self, look: Callable[[Server], Any]) -> Any:
        """Return what ``look`` returns."""
        with Server(self.url) as server:
            return look(server)


@dataclass(frozen=True, slots=True)
class Planned:
    """An engine that is started for the visit and stopped after it."""

    plan: Plan
    events: Callable[[], Any]
    """Makes the display of one start, a context manager of Events."""

    def visit(self, look: Callable[[Server], Any]) -> Any:
        """Return what ``look`` returns."""

        def work(_: object) -> Any:
            with Server(self.plan.url) as server:
                return look(server)

        with self.events() as events:
            shown: Events = events
            return while_served(self.plan, shown, work)


@dataclass(frozen=True, slots=True)
class Derived:
    """An engine whose options follow from what the candidate says of its cache."""

    plan: Callable[[Mapping[str, str]], Planned]


def judge(gates: Sequence[Gate], subject: Subject, options: Options) -> list[Verdict]:
    """Return the gates' verdicts, in their order.

    Raises: ConfigError, if the candidate does not speculate where it must; what starting an engine raises.
    """
    wanted = [gate for gate in gates if gate.wants_references]
    asked = replace(options, references=tuple(subject.references))

    told: dict[str, str] = {}

    def look(server: Server) -> dict[str, Any]:
        _require_speculation(server)
        told.update(cache_config(server.metrics()))
        return {gate.name: gate.candidate(server, asked if gate in wanted else options) for gate in gates}

    states: dict[str, Any] = subject.candidate.visit(look)
    for name, source in subject.references.items() if wanted else ():

        def refer(server: Server, name: str = name) -> None:
            for gate in wanted:
                gate.reference(name, server, states[gate.name], asked)

        (source.plan(told) if isinstance(source, Derived) else source).visit(refer)
    return [gate.verdict(states[gate.name], asked) for gate in gates]


def _require_speculation(server: Server) -> None:
    if "vllm:spec_decode_num_drafts_total" not in server.metrics():
        raise ConfigError(f"{server.url} does not speculate, so there is nothing to judge. Start it with a drafter.")
