"""What a server counts while a gate asks it: tokens that were reused, preemptions, and how far drafts went.

The engine answers first and counts then, so a reader waits until every token that it was given is counted. Otherwise
the last steps of one request would be taken for the next one's.
"""

import threading
import time
from dataclasses import dataclass

from thor_spec.errors import ThorSpecError
from thor_spec.serve import metrics
from thor_spec.serve.client import Server

HITS = "vllm:prefix_cache_hits_total"
GENERATED = "vllm:generation_tokens_total"
_PREEMPTIONS = "vllm:num_preemptions_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
PATIENCE_S = 10.0
POLL_S = 0.02
QUIET_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Between two looks."""

    hits: float = 0.0
    """Tokens that came from the prefix cache."""
    preemptions: float = 0.0
    drafts: float = 0.0
    """Verify steps of requests that had drafts."""
    accepted: tuple[float, ...] = ()
    """Accepted drafts by their place."""

    def __add__(self, other: "Counted") -> "Counted":
        return self._with(other, 1)

    def __sub__(self, other: "Counted") -> "Counted":
        return self._with(other, -1)

    def _with(self, other: "Counted", sign: int) -> "Counted":
        width = max(len(self.accepted), len(other.accepted))
        mine, its = ((*places, *(0.0,) * (width - len(places))) for places in (self.accepted, other.accepted))
        return Counted(
            hits=self.hits + sign * other.hits,
            preemptions=self.preemptions + sign * other.preemptions,
            drafts=self.drafts + sign * other.drafts,
            accepted=tuple(a + sign * b for a, b in zip(mine, its, strict=True)),
        )

    @property
    def tau(self) -> float:
        """Tokens per verify step; 0 without any."""
        return round(1 + sum(self.accepted) / self.drafts, 4) if self.drafts else 0.0


class Meter:
    """Reads a server's counters once they have settled; nobody else must ask it meanwhile."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._given = 0
        self._start = self._quiet()

    def given(self, tokens: int) -> None:
        """Hear of tokens that the server has answered."""
        with self._lock:
            self._given += tokens

    def read(self) -> Counted:
        """Return what is counted by now. Raises: ThorSpecError, if tokens that were given are never counted."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            text = self._server.metrics()
            found = metrics.totals(text)
            behind = self._start + self._given - found.get(GENERATED, 0.0)
            if behind <= 0:
                break
            if time.monotonic() > give_up:
                raise ThorSpecError(
                    f"{self._server.url} has answered {self._given} tokens, and {behind:.0f} of them are not in "
                    f"{GENERATED}, so nothing can be read off its metrics. Start it without -- --disable-log-stats."
                )
            time.sleep(POLL_S)
        places = metrics.by_label(text, _ACCEPTED, "position")
        return Counted(
            hits=found.get(HITS, 0.0),
            preemptions=found.get(_PREEMPTIONS, 0.0),
            drafts=found.get(_DRAFTS, 0.0),
            accepted=tuple(places[place] for place in sorted(places, key=int)),
        )

    def _quiet(self) -> float:
        """Wait until what was asked earlier is counted as well, and return the tokens by then."""
        now = self._generated()
        give_up = time.monotonic() + PATIENCE_S
        while True:
            time.sleep(QUIET_S)
            before, now = now, self._generated()
            if now == before or time.monotonic() > give_up:
                return now

    def _generated(self) -> float:
        return metrics.totals(self._server.metrics()).get(GENERATED, 0.0)
