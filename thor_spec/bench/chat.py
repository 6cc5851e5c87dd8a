"""``bench chat``: arms side by side, repetition by repetition, and the reasons not to believe them.

Arms with the same server share it and take turns within each round; others take turns being started, so that what
drifts drifts for all. A round is one repetition of every arm; every other round goes backwards.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thor_spec.bench import facts, workload
from thor_spec.bench import quality as judging
from thor_spec.bench.arms import Arm, undeclared
from thor_spec.bench.load import Repetition, repeat
from thor_spec.bench.statistic import median_interval, paired_ratio
from thor_spec.bench.turns import turns
from thor_spec.errors import ConfigError
from thor_spec.gates.gate import Options as GateOptions
from thor_spec.gates.judging import Planned, Running
from thor_spec.gates.lossless import Lossless
from thor_spec.gates.verdict import Verdict
from thor_spec.serve.client import Server
from thor_spec.serve.plan import Plan

LEAST_REPETITIONS = 5
FIGURES = ("tok_s", "ttft_s", "tpot_ms", "tau", "relaxed_share", "joules_per_token")
Source = Callable[[Arm], "Running | Planned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to compare."""

    repetitions: int = LEAST_REPETITIONS
    per_start: int = 1
    """Repetitions between two starts of a server, where there are several."""
    tokens: int = 128
    kinds: tuple[str, ...] = workload.KINDS
    quality: bool = False
    quality_seeds: int = judging.SEEDS
    judged: bool = True
    """Whether the lossless gate judges arms that draft: answers of random weights it could not."""
    gate_prompts: int = 8
    tie_gap: float | None = None
    say: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        workload.require_known(self.kinds)


@dataclass(slots=True)
class Outcome:
    """All that was measured, and why it may not be reported."""

    arms: Sequence[Arm]
    repetitions: dict[str, list[Repetition]] = field(default_factory=dict)
    facts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    gates: dict[str, Verdict] = field(default_factory=dict)
    quality: dict[str, judging.Quality] = field(default_factory=dict)

    @property
    def refusals(self) -> list[str]:
        """Reasons not to report; empty for a comparison that can be believed."""
        found = undeclared(self.arms, self.facts)
        red = [(name, verdict) for name, verdict in self.gates.items() if not verdict.passed]
        found += [f"the lossless gate of {name} is red: {verdict.summary}" for name, verdict in red]
        for arm in self.arms:
            repetitions = self.repetitions[arm.name]
            causes = {r.throttling for r in repetitions if r.throttling}
            found += [f"the machine throttled during {arm.name}: {cause}" for cause in sorted(causes)]
            if arm.drafts:
                labels = {answer.rule for r in repetitions for answer in r.answers}
                wanted = arm.rule.described if arm.options.get("temperature", 1.0) else None
                if wanted is not None and "thor_spec" in arm.request and labels != {wanted}:
                    found.append(f"{arm.name} asked for {wanted}, and the server says {', '.join(sorted(labels))}")
        lengths = {tuple(a.prompt_tokens for a in r.answers) for all_ in self.repetitions.values() for r in all_}
        if len(lengths) > 1 and not any("model" in arm.declared for arm in self.arms):
            found.append("the prompts were not of the same length in all arms")
        return found

    def summary(self) -> dict[str, Any]:
        """Return, by arm, each figure with its interval, and its ratio to the first arm's."""
        base = self.arms[0].name
        table = {}
        for arm in self.arms:
            rows: dict[str, Any] = {}
            for name in FIGURES:
                mine, theirs = ([r.figures[name] for r in self.repetitions[a]] for a in (arm.name, base))
                known = [value for value in mine if value is not None]
                if len(known) < len(mine):
                    rows[name] = None
                    continue
                rows[name] = median_interval(known)
                others = [value for value in theirs if value]
                if arm.name != base and len(others) == len(known):
                    rows[name]["ratio"] = paired_ratio(known, others)
            rows["accepted_by_place"] = _share_by_place(self.repetitions[arm.name])
            rows["by_length"] = _by_length(self.repetitions[arm.name])
            if arm.name in self.quality:
                rows["quality"] = self.quality[arm.name].as_dict()
            table[arm.name] = rows
        return table

    def as_dict(self) -> dict[str, Any]:
        """Return the record's content; without a summary, where there is a reason not to report."""
        refusals = self.refusals
        return {
            "arms": {arm.name: {"declared": dict(arm.declared), "shared": dict(arm.shared)} for arm in self.arms},
            "refused": refusals,
            "summary": None if refusals else self.summary(),
            "gates": {name: verdict.as_dict() for name, verdict in self.gates.items()},
            "facts": self.facts,
            "samples": {name: [r.as_dict() for r in found] for name, found in self.repetitions.items()},
        }


def run(arms: Sequence[Arm], source: Source, options: Options) -> Outcome:
    """Measure all arms. Raises: ConfigError; what starting an engine or a request raises."""
    if options.repetitions < LEAST_REPETITIONS:
        raise ConfigError(f"--repetitions {options.repetitions}: an interval needs at least {LEAST_REPETITIONS}.")
    groups: dict[Any, list[Arm]] = {}
    for arm in arms:
        groups.setdefault(arm.server, []).append(arm)
    outcome = Outcome(arms, {arm.name: [] for arm in arms}, {arm.name: [] for arm in arms})
    each_start = options.per_start if len(groups) > 1 else options.repetitions
    done = rounds = 0
    while done < options.repetitions:
        count = min(each_start, options.repetitions - done)
        ordered = list(groups.values()) if rounds % 2 == 0 else list(reversed(groups.values()))
        for group in ordered:
            place = source(group[0])
            visit = _Visit(group, count, getattr(place, "plan", None), outcome, options)
            place.visit(visit)
        done += count
        rounds += 1
    return outcome


@dataclass(frozen=True, slots=True)
class _Visit:
    """What is done with a server that is up, for the arms that share it."""

    group: Sequence[Arm]
    count: int
    plan: Plan | None
    outcome: Outcome
    options: Options

    def __call__(self, server: Server) -> None:
        """Look at what is there, judge it the first time, warm up, and measure."""
        options, outcome = self.options, self.outcome
        seen = facts.of_server(server, self.plan)
        requests = workload.requests(options.kinds, context=server.context, tokens=options.tokens)
        is_first = not outcome.facts[self.group[0].name]
        for arm in self.group:
            outcome.facts[arm.name].append(seen)
        if options.judged and is_first and self.group[0].drafts:
            gate, asked = Lossless(), GateOptions(count=options.gate_prompts, tie_gap=options.tie_gap)
            verdict = gate.verdict(gate.candidate(server, asked), asked)
            options.say(verdict.as_text())
            outcome.gates |= {arm.name: verdict for arm in self.group}
        for arm in self.group:  # warms shapes, caches and graphs of every batch size
            repeat(server, requests, batch=arm.batch, said=arm.request)
        for _, arm in turns(self.group, self.count):
            found = repeat(server, requests, batch=arm.batch, said=arm.request)
            outcome.repetitions[arm.name].append(found)
            options.say(f"{arm.name}: {_line(found.figures)}")
        if options.quality and is_first:
            outcome.quality |= {
                arm.name: judging.measure(server, arm.request, seeds=options.quality_seeds) for arm in self.group
            }


def _share_by_place(repetitions: Sequence[Repetition]) -> list[float]:
    """Return, by place in the draft, the share of steps in which it was accepted."""
    drafts = sum(r.drafts for r in repetitions)
    places = max((len(r.accepted_by_place) for r in repetitions), default=0)
    if not drafts:
        return []
    return [
        sum(r.accepted_by_place[i] for r in repetitions if i < len(r.accepted_by_place)) / drafts for i in range(places)
    ]


def _by_length(repetitions: Sequence[Repetition]) -> dict[int, dict[str, float]]:
    """Return, by the tokens that a step drafts, its share of steps, the tokens that a sequence gains, and its time."""
    sums: dict[int, Counter[str]] = {}
    for repetition in repetitions:
        for length, figures in repetition.by_length.items():
            sums.setdefault(length, Counter()).update(figures)
    every = sum(found["steps"] for found in sums.values())
    return {
        length: {
            "share": found["steps"] / every,
            "tokens": found["tokens"] / found["steps"],
            "ms": 1000 * found["seconds"] / found["steps"],
        }
        for length, found in sorted(sums.items())
        if found["steps"]
    }


def _line(figures: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items() if value is not None)
