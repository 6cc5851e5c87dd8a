"""What an engine does, from two answers of its ``/metrics``."""

from dataclasses import dataclass
from typing import NamedTuple

from thor_spec.serve import metrics

_TOKENS = "vllm:generation_tokens_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV = "vllm:kv_cache_usage_perc"
_QUERIES = "vllm:prefix_cache_queries_total"
_HITS = "vllm:prefix_cache_hits_total"


class Sample(NamedTuple):
    """One answer, at a moment of the monotonic clock."""

    at_s: float
    totals: dict[str, float]
    accepted_at: dict[int, float]
    """Accepted tokens by position in the draft, counted from 0."""

    @classmethod
    def read(cls, text: str, at_s: float) -> "Sample":
        """Read the text of ``/metrics``. Raises: ValueError."""
        by_position = metrics.by_label(text, _ACCEPTED_AT, "position")
        return cls(
            at_s, metrics.totals(text), {int(name): value for name, value in by_position.items() if name.isdecimal()}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What happened between two answers, and what is so at the second. None where it cannot be said."""

    tokens_per_s: float | None = None
    tokens_per_step: float | None = None
    """Emitted per verify step; None while nothing was drafted."""
    acceptance: tuple[float, ...] = ()
    """Share of the steps that accepted the draft's token at each position."""
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    hit_rate: float | None = None
    """Of prompt tokens that were looked up in the prefix cache."""


def between(before: Sample | None, now: Sample) -> Vitals:
    """Return the vitals. A counter that went backwards is another engine's: nothing is said about the time between."""
    now_totals = now.totals

    def grown(name: str) -> float | None:
        if before is None or name not in now_totals:
            return None
        change = now_totals[name] - before.totals.get(name, 0.0)
        return change if change >= 0 else None

    tokens, drafts, accepted = grown(_TOKENS), grown(_DRAFTS), grown(_ACCEPTED)
    queries, hits = grown(_QUERIES), grown(_HITS)
    elapsed = now.at_s - before.at_s if before else 0.0
    return Vitals(
        tokens_per_s=tokens / elapsed if tokens is not None and elapsed > 0 else None,
        tokens_per_step=1 + accepted / drafts if drafts and accepted is not None else None,
        acceptance=_acceptance(before, now, drafts),
        running=_count(now_totals.get(_RUNNING)),
        waiting=_count(now_totals.get(_WAITING)),
        kv_usage=now_totals.get(_KV),
        hit_rate=hits / queries if queries and hits is not None else None,
    )


def _acceptance(before: Sample | None, now: Sample, drafts: float | None) -> tuple[float, ...]:
    if before is None or not drafts:
        return ()
    places = range(max(now.accepted_at, default=-1) + 1)
    grown = [now.accepted_at.get(place, 0.0) - before.accepted_at.get(place, 0.0) for place in places]
    return tuple(change / drafts for change in grown) if min(grown, default=0.0) >= 0 else ()


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)
