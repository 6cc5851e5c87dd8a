"""Gate: speculation changes no greedy token, but at ties.

Two questions, each of which finds what the other misses. Are the tokens those of a server without speculation, up to
the first difference? And is every token, given all before it, the likeliest to the target itself, when it is handed
the answer as a prompt, which no draft, state slot or accepted length is part of? The second goes on behind the first
difference, so a corruption cannot hide there; it is also all there is without a second server.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thor_spec.errors import ConfigError
from thor_spec.gates import prompts
from thor_spec.gates.gate import Options
from thor_spec.gates.ties import tie_bound
from thor_spec.gates.verdict import Verdict
from thor_spec.serve.client import Answer, Forced, Server
from thor_spec.serve.metrics import totals

NAME = "lossless"
LEAST_EQUAL = 0.7
"""Share of tokens before the first difference to the reference. A corruption ends most answers early; ties are rare."""
MOST_TIES = 0.03
"""Share of tokens that may lie below the likeliest by less than the bound: many small errors are no ties."""
SPARE_TIES = 3
BOUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """One answer under teacher forcing."""

    tokens: int
    ties: tuple[str, ...]
    wrong: tuple[str, ...]


def collect(server: Server, *, count: int, tokens: int, **options: Any) -> list[Answer]:
    """Return the greedy answers to the gate's prompts, one at a time, so that no neighbour tips a tie."""
    return server.complete_all(prompts.read()[:count], max_tokens=tokens, **options)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def audit(label: str, steps: Sequence[Forced], bound: Callable[[int], float]) -> Audit:
    """Judge each token of an answer by what the target says about it; ``bound(i)`` is the tie's gap at step i.

    A bound takes a request, and a corrupted answer needs one almost everywhere: behind the first few places the widest
    of theirs stands for the rest.
    """
    limits: list[float] = []
    ties: list[str] = []
    wrong: list[str] = []
    for i, step in enumerate(steps):
        if step.gap <= 0:
            continue
        limits += [bound(i)] if len(limits) < BOUNDS else [max(limits)]
        limit = limits[-1]
        text = (
            f"{label} token {i}: {step.token} lies {step.gap:.4f} below {step.top[0][0]}, a tie is at most {limit:.4f}"
        )
        (ties if step.gap <= limit else wrong).append(text)
    return Audit(tokens=len(steps), ties=tuple(ties), wrong=tuple(wrong))


def judge(candidate: Sequence[Answer], judge_server: Server, *, tie_gap: float | None = None) -> list[Audit]:
    """Hand every answer to ``judge_server`` as a prompt and audit its tokens."""
    found = []
    for answer in candidate:
        whole = [*answer.prompt, *answer.tokens]
        start = len(answer.prompt)

        def bound(i: int, whole: list[int] = whole, start: int = start) -> float:
            return gap_of_a_tie(judge_server, whole[: start + i], tie_gap)

        found.append(audit(_label(answer), judge_server.forced(whole, start), bound))
    return found


def compare(
    candidate: Sequence[Answer],
    audits: Sequence[Audit],
    *,
    accepted: float,
    references: Mapping[str, Sequence[Answer]],
) -> Verdict:
    """Return the verdict over answers, their audits and what reference servers answered.

    Args:
        accepted: drafts that the candidate accepted meanwhile, by its own count.
        references: answers of each reference, by its name; may be empty.
    """
    total = sum(audit.tokens for audit in audits)
    ties = [tie for audit in audits for tie in audit.ties]
    wrong = [f"wrong: {text}" for audit in audits for text in audit.wrong]
    allowed = SPARE_TIES + MOST_TIES * total
    if len(ties) > allowed:
        wrong.append(
            f"wrong: {len(ties)} of {total} tokens lie within a tie's reach of the likeliest, too many for ties"
        )
    if not accepted:
        wrong.append("wrong: no draft was accepted, so nothing was tested")
    equal: dict[str, int] = {}
    for name, answers in references.items():
        same = [first_difference(a.tokens, b.tokens) for a, b in zip(candidate, answers, strict=True)]
        equal[name] = sum(same)
        lengths = [f"{_label(a)}" for a, b in zip(candidate, answers, strict=True) if len(a.tokens) != len(b.tokens)]
        wrong += [f"wrong: {label} has another length than {name} gave it" for label in lengths]
        if equal[name] < LEAST_EQUAL * total:
            wrong.append(f"wrong: only {equal[name]} of {total} tokens equal {name} before the first difference")
    against = "; ".join(f"{count} of {total} tokens before any difference to {name}" for name, count in equal.items())
    said = against or f"{total} tokens judged by the target itself"
    return Verdict(
        gate=NAME,
        passed=not wrong,
        summary=f"{len(candidate)} answers, {said}, {len(ties)} ties, {sum(len(a.wrong) for a in audits)} wrong",
        figures={
            "answers": len(candidate),
            "tokens": total,
            "equal_before_difference": equal,
            "ties": len(ties),
            "wrong": sum(len(audit.wrong) for audit in audits),
            "accepted_drafts": accepted,
        },
        findings=(*wrong, *(f"tie: {tie}" for tie in ties)),
    )


class Lossless:
    """The gate."""

    name = NAME
    wants_references = True
    wants_caching = False

    def candidate(self, server: Server, options: Options) -> "_State":
        """Collect answers; without a reference to come, the candidate's own teacher-forced pass judges them."""
        before = accepted_drafts(server)
        answers = collect(server, count=options.count, tokens=options.tokens, **planted(options.control))
        state = _State(answers, accepted_drafts(server) - before)
        if not options.references:
            state.audits = judge(answers, server, tie_gap=options.tie_gap)
        return state

    def reference(self, name: str, server: Server, state: "_State", options: Options) -> None:
        """Collect the same answers; the first reference judges the candidate's."""
        state.references[name] = collect(server, count=options.count, tokens=options.tokens)
        if not state.audits:
            state.audits = judge(state.answers, server, tie_gap=options.tie_gap)

    def verdict(self, state: "_State", options: Options) -> Verdict:  # noqa: ARG002
        """Conclude."""
        return compare(state.answers, state.audits, accepted=state.accepted, references=state.references)


@dataclass(slots=True)
class _State:
    answers: list[Answer]
    accepted: float
    audits: list[Audit] = field(default_factory=list)
    references: dict[str, list[Answer]] = field(default_factory=dict)


def planted(control: str) -> dict[str, Any]:
    """Return the option by which a request asks for a corruption; nothing for none."""
    return {"thor_spec": {"control": control}} if control else {}


def accepted_drafts(server: Server) -> float:
    """Return how many drafts the server has accepted since its start."""
    return totals(server.metrics()).get("vllm:spec_decode_num_accepted_tokens_total", 0.0)


def gap_of_a_tie(server: Server, before: Sequence[int], tie_gap: float | None) -> float:
    """Return the largest gap of a tie after the tokens ``before``; ``tie_gap`` where that is given."""
    if tie_gap is not None:
        return tie_gap
    layers = server.text_config.get("num_hidden_layers")
    if layers is None:
        raise ConfigError(f"The files of {server.model} are not on this machine. Say what a tie is: --tie-gap.")
    return tie_bound(server.spread(before), int(layers))


def _label(answer: Answer) -> str:
    return f"prompt of {len(answer.prompt)} tokens ({answer.text[:16]!r})"
