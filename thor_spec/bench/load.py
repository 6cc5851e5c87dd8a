"""One repetition: all requests of the workload, so many at once, timed as a client sees them."""

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from thor_spec.bench.meter import Meter
from thor_spec.bench.statistic import percentile
from thor_spec.bench.workload import Request
from thor_spec.errors import ThorSpecError
from thor_spec.serve import metrics
from thor_spec.serve.client import Server

RULE_HEADER = "x-thor-spec-accept"
_POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_TAKEN = "thor_spec:accepted_tokens_total"
_RELAXED = "thor_spec:relaxed_tokens_total"
_OF_LENGTHS = {f"thor_spec:draft_length_{of}_total": of for of in ("steps", "tokens", "seconds")}


@dataclass(frozen=True, slots=True)
class Timed:
    """One streamed answer."""

    kind: str
    tokens: int
    prompt_tokens: int
    ttft_s: float
    tpot_s: float
    """Seconds per token behind the first."""
    rule: str


@dataclass(frozen=True, slots=True)
class Repetition:
    """What one pass over the workload gave."""

    seconds: float
    tokens: int
    answers: tuple[Timed, ...]
    drafts: float
    accepted: float
    accepted_by_place: tuple[float, ...]
    taken: float
    """Drafts that steps with a relaxed request took; vLLM's ``accepted`` leaves out those behind an answer's end."""
    relaxed: float
    """Of these, those that a threshold allowed."""
    by_length: Mapping[int, Mapping[str, float]]
    """With --adaptive-drafts, by the tokens that a step drafts: ``steps``, the ``tokens`` that a sequence gained in
    them, and their ``seconds``. Steps with prompts, and those where the number changes, are left out."""
    joules: float | None
    degrees: float | None
    throttling: str | None

    @property
    def figures(self) -> dict[str, float | None]:
        """What is summarized over repetitions."""
        return {
            "tok_s": self.tokens / self.seconds,
            "ttft_s": percentile([a.ttft_s for a in self.answers], 0.5),
            "tpot_ms": 1000 * percentile([a.tpot_s for a in self.answers], 0.5),
            "tau": 1 + self.accepted / self.drafts if self.drafts else None,
            "relaxed_share": (self.relaxed / self.taken if self.taken else 0.0) if self.accepted else None,
            "joules_per_token": None if self.joules is None else self.joules / self.tokens,
        }

    def as_dict(self) -> dict[str, Any]:
        """Return fields and figures, JSON-ready."""
        return {**asdict(self), "figures": self.figures}


def repeat(server: Server, requests: Sequence[Request], *, batch: int, said: Mapping[str, Any]) -> Repetition:
    """Send every request once, ``batch`` at a time, each with what the arm says. Raises: ThorSpecError."""
    totals_were, places_were, lengths_were = _read(server.metrics())
    with Meter() as meter:
        began = time.monotonic()
        with ThreadPoolExecutor(batch) as pool:
            answers = list(pool.map(lambda request: stream(server, request, said), requests))
        seconds = time.monotonic() - began
    totals, places, lengths = _read(server.metrics())
    drafts, accepted, taken, relaxed = (
        totals.get(name, 0.0) - totals_were.get(name, 0.0) for name in (_DRAFTS, _ACCEPTED, _TAKEN, _RELAXED)
    )
    return Repetition(
        seconds=seconds,
        tokens=sum(answer.tokens for answer in answers),
        answers=tuple(answers),
        drafts=drafts,
        accepted=accepted,
        accepted_by_place=tuple(count - places_were.get(place, 0.0) for place, count in sorted(places.items())),
        taken=taken,
        relaxed=relaxed,
        by_length={
            length: {of: value - lengths_were.get(length, {}).get(of, 0.0) for of, value in figures.items()}
            for length, figures in sorted(lengths.items())
        },
        joules=meter.joules,
        degrees=meter.degrees,
        throttling=meter.throttling,
    )


def stream(server: Server, request: Request, said: Mapping[str, Any]) -> Timed:
    """Send one request and time what comes back."""
    body = {
        "model": server.model,
        "seed": request.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **request.body,
        **said,
    }
    began = time.monotonic()
    first = last = None
    usage: Mapping[str, Any] = {}
    try:
        with server.stream(request.path, body) as response:
            if response.status_code != httpx.codes.OK:
                raise ThorSpecError(f"{request.path} answered {response.status_code}: {response.read()[:300]!r}")
            rule = response.headers.get(RULE_HEADER, "")
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ThorSpecError(f"{request.path} broke off: {event['error']}")
                usage = event.get("usage") or usage
                if any(choice.get("token_ids") for choice in event["choices"]):
                    last = time.monotonic()
                    first = first or last
    except httpx.HTTPError as error:
        raise ThorSpecError(f"{request.path} broke off: {error or type(error).__name__}.") from error
    tokens = int(usage.get("completion_tokens", 0))
    if first is None or last is None or tokens != request.body["max_tokens"]:
        raise ThorSpecError(
            f"A {request.kind} request asked for {request.body['max_tokens']} tokens, and got {tokens}."
        )
    return Timed(
        kind=request.kind,
        tokens=tokens,
        prompt_tokens=int(usage["prompt_tokens"]),
        ttft_s=first - began,
        tpot_s=(last - first) / max(tokens - 1, 1),
        rule=rule,
    )


def by_place(text: str) -> dict[int, float]:
    """Return how many drafts were accepted at each place, from the text of ``/metrics``."""
    return {int(place): count for place, count in metrics.by_label(text, _POSITIONS, "position").items()}


def by_length(text: str) -> dict[int, dict[str, float]]:
    """Return the figures of steps by the tokens that they draft, over all depths, from the text of ``/metrics``."""
    found: dict[int, dict[str, float]] = {}
    for name, of in _OF_LENGTHS.items():
        for length, value in metrics.by_label(text, name, "draft_tokens").items():
            found.setdefault(int(length), {})[of] = value
    return found


def _read(text: str) -> tuple[dict[str, float], dict[int, float], dict[int, dict[str, float]]]:
    return metrics.totals(text), by_place(text), by_length(text)
