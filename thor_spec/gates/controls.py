"""Gate over gates: every planted corruption turns the gate red that is there to see it."""

from dataclasses import dataclass, replace

from thor_spec.config import CONTROLS
from thor_spec.errors import ConfigError, ThorSpecError
from thor_spec.gates.distribution import Distribution
from thor_spec.gates.gate import Gate, Options
from thor_spec.gates.lossless import Lossless
from thor_spec.gates.verdict import Verdict
from thor_spec.serve.client import Server

RELAXED = "relaxed"
"""Not planted: a lossy rule, which ``distribution`` must recognize."""
KINDS = (*CONTROLS, RELAXED)
_SAMPLED = ("sharpened", RELAXED)  # a greedy answer does not show these
_RECURRENT = ("state-slot", "conv-window", "accepted-length")


@dataclass(frozen=True, slots=True)
class Caught:
    """What became of one corruption."""

    kind: str
    gate: str
    verdict: Verdict


class Controls:
    """The gate."""

    name = "controls"
    wants_references = False
    wants_caching = False

    def candidate(self, server: Server, options: Options) -> tuple[Caught, ...]:
        """Plant one corruption after the other. The answers are judged by the server's own teacher-forced pass."""
        require_allowed(server)
        found = []
        for kind in applicable(server):
            gate: Gate = Distribution() if kind in _SAMPLED else Lossless()
            asked = replace(options, control=kind, references=())
            verdict = gate.verdict(gate.candidate(server, asked), asked)
            options.say(f"{kind}: {gate.name} is {'green' if verdict.passed else 'red'}")
            found.append(Caught(kind, gate.name, verdict))
        return tuple(found)

    def reference(self, name: str, server: Server, state: tuple[Caught, ...], options: Options) -> None:
        """Need none."""

    def verdict(self, state: tuple[Caught, ...], options: Options) -> Verdict:  # noqa: ARG002
        """Conclude: green if all were seen."""
        missed = [each for each in state if each.verdict.passed]
        return Verdict(
            gate=self.name,
            passed=bool(state) and not missed,
            summary=f"{len(state) - len(missed)} of {len(state)} planted corruptions turn their gate red",
            figures={each.kind: {"gate": each.gate, "red": not each.verdict.passed} for each in state},
            findings=tuple(f"wrong: {each.gate} does not see {each.kind}: {each.verdict.summary}" for each in missed),
        )


def applicable(server: Server) -> list[str]:
    """Return the corruptions that can be planted in this server's model."""
    config = server.text_config
    recurrent = (
        not config or "linear_num_value_heads" in config or "linear_attention" in (config.get("layer_types") or ())
    )
    return [kind for kind in KINDS if recurrent or kind not in _RECURRENT]


def require_allowed(server: Server) -> None:
    """Raise ConfigError where a server lets nobody corrupt anything."""
    try:
        server.complete("x", max_tokens=1, thor_spec={"control": next(iter(CONTROLS))})
    except ThorSpecError as error:
        raise ConfigError(
            f"{server.url} plants no corruption ({error}). Start it with `thor-spec serve --allow-controls`, or let "
            "`thor-spec verify` start one."
        ) from error
