"""Whether a serving engine still works, by what it counts and not by what its API claims. No I/O, no clock of its own.

``/health`` answers 200 over a hung engine and times out on a busy one. The rules are numbered as in the table of
docs/guard.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from thor_spec.serve.activity import Activity, Motion

STALL_S = 120.0
COMPILING_STALL_S = 600.0
NEVER_SCHEDULED_S = 60.0
SCRAPE_FAILURES = 3
FLAT_S = 120.0
BUSY_S = 600.0
IDLE_S = 300.0
CANARY_FAILURES = 2
DEAD_POLLS = 2
DRAFTED_TOKENS = 500
DEGENERATE_ACCEPTANCE = 0.99

_ITERATIONS = "vllm:iteration_tokens_total_count"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class Scrape(NamedTuple):
    """One answer of ``/metrics``; None where this vLLM does not tell."""

    iterations: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    drafted: float | None = None
    accepted: float | None = None

    @classmethod
    def of(cls, totals: Mapping[str, float]) -> "Scrape":
        """Return the answer in the values of ``metrics.totals``."""
        names = (_ITERATIONS, _RUNNING, _WAITING, _KV_USAGE, _DRAFTED, _ACCEPTED)
        return cls(*(totals.get(name) for name in names))


class Health(StrEnum):
    """What the rules say."""

    HEALTHY = "healthy"
    BUSY = "busy"
    UNKNOWN = "unknown"
    STALLED = "stalled"
    ENGINE_DEAD = "engine dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The state after one look. ``events`` are for people; ``wants_*`` ask the caller for a request."""

    health: Health
    reason: str = ""
    events: tuple[str, ...] = ()
    wants_canary: bool = False
    wants_sample: bool = False
    progressed: bool = False


class Liveness:
    """The rules, fed with scrapes, looks at the engine's processes, and canary results."""

    def __init__(self, now_s: float) -> None:
        self._motion = Motion()
        self._dead_polls = 0
        self._failures = 0
        self._first_failure_s = now_s
        self._moved_s = now_s
        self._iterations: float | None = None
        self._iterated_s = now_s  # the counter moved, or there was nothing to count
        self._compiled_s = now_s
        self._unscheduled_s: float | None = None
        self._active_s = now_s
        self._canary_failures = 0
        self._canary_pending = False
        self._draft_base: tuple[float, float] | None = None
        self._sample_pending = False
        self._alarmed = False

    def engine(self, alive: bool) -> Verdict | None:
        """Rule 3: take whether any engine process lives; return the end after two polls without one."""
        self._dead_polls = 0 if alive else self._dead_polls + 1
        if self._dead_polls < DEAD_POLLS:
            return None
        return Verdict(health=Health.ENGINE_DEAD, reason="no engine process is left, though the API may still answer")

    def scraped(self, scrape: Scrape | None, activity: Activity, now_s: float) -> Verdict:
        """Take an answer of ``/metrics``, or None for a failure, and what the job has done by now."""
        sign = self._motion.feed(activity, now_s)
        if activity.compilers:
            self._compiled_s = now_s
        if scrape is None:
            return self._unanswered(bool(sign.moved & {"cpu", "log"} or sign.gpu), now_s)
        self._failures = 0
        events: list[str] = []
        progressed = self._count(scrape, events, now_s)
        wants_sample = self._acceptance(scrape, events)
        reason = self._standing_still(scrape, activity.compilers, now_s) or self._never_scheduled(scrape, now_s)
        if self._canary_failures >= CANARY_FAILURES:
            reason = reason or f"{CANARY_FAILURES} one-token requests to the idle engine failed"  # rule 5
        return Verdict(
            health=Health.STALLED if reason else Health.HEALTHY,
            reason=reason,
            events=tuple(events),
            wants_canary=not reason and self._is_idle(scrape, now_s),
            wants_sample=wants_sample,
            progressed=progressed,
        )

    def canary(self, answered: bool, now_s: float) -> None:
        """Take the result of a canary that was asked for."""
        self._canary_pending = False
        self._canary_failures = 0 if answered else self._canary_failures + 1
        if answered:
            self._active_s = now_s

    def sample(self, repeating: bool) -> str | None:
        """Take whether sampled text repeats itself; return the alarm of rule 7, or None."""
        self._sample_pending = False
        if not repeating or self._alarmed:
            return None
        self._alarmed = True
        return (
            f"ALARM: {DEGENERATE_ACCEPTANCE:.0%} of {DRAFTED_TOKENS} drafted tokens or more were accepted and the text "
            "repeats itself: the output is degenerate. Compare with --draft none."
        )

    def _unanswered(self, moved: bool, now_s: float) -> Verdict:
        """Rule 4: a failed scrape says nothing; what the engine does says more."""
        if self._failures == 0:
            self._first_failure_s = self._moved_s = now_s
        self._failures += 1
        if moved:
            self._moved_s = now_s
        if self._failures < SCRAPE_FAILURES:
            return Verdict(health=Health.UNKNOWN, reason="the metrics do not answer")
        if now_s - self._first_failure_s > BUSY_S:
            return Verdict(health=Health.STALLED, reason=f"the API has not answered for {BUSY_S:g} s")
        if now_s - self._moved_s >= FLAT_S:
            reason = f"the API does not answer, and the engine has done nothing for {FLAT_S:g} s"
            return Verdict(health=Health.STALLED, reason=reason)
        return Verdict(health=Health.BUSY, reason="the API does not answer, and the engine works")

    def _count(self, scrape: Scrape, events: list[str], now_s: float) -> bool:
        """Follow the iteration counter; return whether it went up. Rule 6: backwards means another engine."""
        before, self._iterations = self._iterations, scrape.iterations
        if before is not None and scrape.iterations is not None and scrape.iterations < before:
            events.append("the engine restarted by itself: its counters went backwards")
            self._draft_base = None
            self._alarmed = False
            self._iterated_s = self._active_s = now_s
            return False
        progressed = before is not None and scrape.iterations is not None and scrape.iterations > before
        if progressed or before is None or not scrape.running:
            self._iterated_s = now_s
        if progressed or scrape.running or scrape.waiting:
            self._active_s = now_s
        if progressed:
            self._canary_failures = 0
        return progressed

    def _standing_still(self, scrape: Scrape, compilers: bool, now_s: float) -> str:
        """Rule 1: requests run and no iteration comes; compilers excuse it for longer."""
        if not scrape.running or scrape.iterations is None:
            return ""
        still_s = now_s - self._iterated_s
        excused_s = now_s - max(self._iterated_s, self._compiled_s)
        if still_s < COMPILING_STALL_S and (compilers or excused_s < STALL_S):
            return ""
        return f"{scrape.running:g} requests run and no iteration has ended for {still_s:.0f} s"

    def _never_scheduled(self, scrape: Scrape, now_s: float) -> str:
        """Rule 2: requests wait, none runs, and the cache is empty (vllm#55800)."""
        stuck = bool(scrape.waiting) and scrape.running == 0 and scrape.kv_usage == 0
        if not stuck:
            self._unscheduled_s = None
            return ""
        if self._unscheduled_s is None:
            self._unscheduled_s = now_s
        waited_s = now_s - self._unscheduled_s
        if waited_s < NEVER_SCHEDULED_S:
            return ""
        return f"{scrape.waiting:g} requests wait and none has been scheduled for {waited_s:.0f} s"

    def _is_idle(self, scrape: Scrape, now_s: float) -> bool:
        """Rule 5: an idle engine proves nothing, so it is asked for a token now and then."""
        idle = not scrape.running and not scrape.waiting
        due = now_s - self._active_s >= IDLE_S or self._canary_failures > 0
        if not idle or not due or self._canary_pending:
            return False
        self._canary_pending = True
        return True

    def _acceptance(self, scrape: Scrape, events: list[str]) -> bool:
        """Rule 7: drafts of which none, or all, are accepted; return whether text must be looked at."""
        if scrape.drafted is None or scrape.accepted is None:
            return False
        if self._draft_base is None:
            self._draft_base = (scrape.drafted, scrape.accepted)
        drafted = scrape.drafted - self._draft_base[0]
        if drafted < DRAFTED_TOKENS:
            return False
        rate = (scrape.accepted - self._draft_base[1]) / drafted
        self._draft_base = (scrape.drafted, scrape.accepted)
        if 0 < rate < DEGENERATE_ACCEPTANCE:
            self._alarmed = False
            return False
        if rate >= DEGENERATE_ACCEPTANCE:
            wants = not self._sample_pending and not self._alarmed
            self._sample_pending = self._sample_pending or wants
            return wants
        if not self._alarmed:
            self._alarmed = True
            events.append(
                f"ALARM: none of {drafted:g} drafted tokens was accepted, so speculation only costs. "
                "Check that the drafter belongs to this model."
            )
        return False
