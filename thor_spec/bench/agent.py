"""Agents' sessions against off, cache, DFlash, and both: the same requests, one server after the other."""

import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from thor_spec.bench import load, traces
from thor_spec.bench.statistic import median_interval, paired_ratio
from thor_spec.bench.traces import Session
from thor_spec.bench.workload import Request
from thor_spec.serve.client import Server
from thor_spec.serve.metrics import totals

ARMS: dict[str, dict[str, Any]] = {
    "off": {"draft": "none", "caching": False},
    "cache": {"draft": "none", "caching": True},
    "dflash": {"caching": False},
    "both": {"caching": True},
}
_HITS, _ASKED = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"


class Source(Protocol):
    """A server that can be visited."""

    def visit(self, look: Callable[[Server], Any]) -> Any:
        """Return what ``look`` returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of one session."""

    session: int
    turn: int
    prompt_tokens: int
    ttft_s: float
    seconds: float
    tau: float | None
    """Tokens per verify step while this request ran; None where others ran beside it, or nothing was drafted."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """All sessions, once."""

    seconds: float
    hit_rate: float
    turns: tuple[Turn, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-ready."""
        return asdict(self)


def replay(server: Server, sessions: Sequence[Session], *, at_once: int, tokens: int) -> Repetition:
    """Play every session from its first request to its last, ``at_once`` side by side, from an empty cache."""
    salt = uuid.uuid4().hex  # nothing of an earlier repetition is found
    before = totals(server.metrics())

    def play(number: int) -> list[Turn]:
        found = []
        for turn, messages in enumerate(traces.requests(sessions[number])):
            body = {
                "messages": messages,
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0,
                "cache_salt": salt,
            }
            request = Request(kind="agent", path="/v1/chat/completions", body=body, seed=number)
            counted = totals(server.metrics()) if at_once == 1 else {}
            began = time.monotonic()
            timed = load.stream(server, request, {})
            seconds = time.monotonic() - began
            tau = _tau(counted, totals(server.metrics())) if at_once == 1 else None
            found.append(
                Turn(
                    session=number, turn=turn, prompt_tokens=timed.prompt_tokens, ttft_s=timed.ttft_s, seconds=seconds,
                    tau=tau,
                )
            )  # fmt: skip
        return found

    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        played = list(pool.map(play, range(len(sessions))))
    seconds = time.monotonic() - began
    after = totals(server.metrics())
    asked = after.get(_ASKED, 0.0) - before.get(_ASKED, 0.0)
    hits = after.get(_HITS, 0.0) - before.get(_HITS, 0.0)
    turns = tuple(turn for session in played for turn in session)
    # Looking at the metrics is no part of a session.
    busy = sum(turn.seconds for turn in turns) if at_once == 1 else seconds
    return Repetition(busy, hits / asked if asked else 0.0, turns)


def run(
    sources: Mapping[str, Source], sessions: Sequence[Session], *, at_once: int, tokens: int, repetitions: int,
    rounds: int, say: Callable[[str], None],
) -> dict[str, list[Repetition]]:  # fmt: skip
    """Measure every arm, ``rounds`` starts each, every other round backwards. The first request of a start warms up."""
    found: dict[str, list[Repetition]] = {name: [] for name in sources}
    for number in range(rounds):
        order = list(sources)[:: -1 if number % 2 else 1]
        for name in order:

            def look(server: Server, name: str = name) -> None:
                replay(server, sessions[:1], at_once=1, tokens=tokens)
                for _ in range(repetitions):
                    found[name].append(replay(server, sessions, at_once=at_once, tokens=tokens))
                    say(f"{name}: {found[name][-1].seconds:.2f} s, {found[name][-1].hit_rate:.0%} of tokens reused")

            sources[name].visit(look)
    return found


def refusals(found: Mapping[str, Sequence[Repetition]], *, caching: Mapping[str, bool]) -> list[str]:
    """Return why nothing can be believed: other prompts, a cache that did nothing, or one where none should be."""
    reasons = []
    lengths = {name: [turn.prompt_tokens for turn in rows[0].turns] for name, rows in found.items()}
    first = next(iter(lengths))
    for name, rows in found.items():
        if lengths[name] != lengths[first]:
            reasons.append(f"{name} was asked prompts of other lengths than {first}")
        rates = [row.hit_rate for row in rows]
        if caching[name] and not min(rates):
            reasons.append(f"{name} caches prefixes, and reused nothing: the sessions are shorter than a block")
        if not caching[name] and max(rates):
            reasons.append(f"{name} reused tokens, and should cache nothing")
    return reasons


def summary(found: Mapping[str, Sequence[Repetition]]) -> dict[str, Any]:
    """Return medians with intervals, how much faster each arm is than the first, TTFT by turn, and τ by depth."""
    base = [row.seconds for row in next(iter(found.values()))]
    result = {}
    for name, rows in found.items():
        turns = [turn for row in rows for turn in row.turns]
        seconds = [row.seconds for row in rows]
        result[name] = {
            "seconds": median_interval(seconds),
            "times_faster": paired_ratio(base, seconds),
            "hit_rate": statistics.median(row.hit_rate for row in rows),
            "ttft_s_by_turn": [
                statistics.median(turn.ttft_s for turn in turns if turn.turn == number)
                for number in range(1 + max(turn.turn for turn in turns))
            ],
            "tau_by_depth": _by_depth(turns),
        }
    return result


def _by_depth(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the mean τ of requests by their prompts' lengths, in powers of two."""
    found: dict[int, list[float]] = {}
    for turn in turns:
        if turn.tau is not None:
            found.setdefault(1 << (turn.prompt_tokens.bit_length() - 1), []).append(turn.tau)
    return {f"{depth}+": statistics.mean(values) for depth, values in sorted(found.items())}


def _tau(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    drafts = after.get(_DRAFTS, 0.0) - before.get(_DRAFTS, 0.0)
    return 1 + (after.get(_ACCEPTED, 0.0) - before.get(_ACCEPTED, 0.0)) / drafts if drafts else None
