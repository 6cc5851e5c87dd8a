"""Gate: what comes from the prefix cache changes nothing.

Cold and warm are compared in one mode, on one server: a request under a ``cache_salt`` of its own finds nothing in the
cache, the same request under the salt of its conversation finds what the earlier ones left. Against a server without
the cache nothing could be compared bit by bit, since the engine then keeps its states in another mode.
"""

import contextlib
import itertools
import math
import statistics
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from thor_spec.config import CACHED_CONTROLS
from thor_spec.errors import ConfigError, ThorSpecError
from thor_spec.gates import conversations, prompts
from thor_spec.gates.conversations import ANSWER, Conversation, Prompt, Size, Text
from thor_spec.gates.counted import HITS, Counted, Meter
from thor_spec.gates.gate import Options, Paced
from thor_spec.gates.lossless import first_difference, gap_of_a_tie
from thor_spec.gates.verdict import Verdict
from thor_spec.serve import metrics
from thor_spec.serve.client import Answer, Server

NAME = "prefix-cache"
ODD, SMALL = "odd", "small"
"""References: prompts in chunks of an odd size below a block, so that cold and warm are cut alike; and a cache that is
too small, so that blocks are evicted and requests preempted."""
LONGEST = 12288
AT_ONCE = 4
LESS_ACCEPTED = 0.02
"""Tokens per verify step that the warm pass may lie below the cold one, where drafts need not be the same."""
CORRUPTED = 8
"""Prompts that are asked again for each corruption."""
ABORT_AFTER_S = 0.05
STANDARD_ERRORS = 3.0
"""By which a loss of acceptance must exceed chance, where rounding differs between cold and warm."""


@dataclass(slots=True)
class Section:
    """What one part found."""

    conversations: int = 0
    requests: int = 0
    same_bits: int = 0
    ties: int = 0
    reused: int = 0
    counted: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures."""
        return {
            "conversations": self.conversations,
            "requests": self.requests,
            "same_bits": self.same_bits,
            "ties": self.ties,
            "tokens_reused": self.reused,
            **self.counted,
        }


class PrefixCache:
    """The gate."""

    name = NAME
    wants_references = True
    wants_caching = True

    def candidate(self, server: Server, options: Options) -> dict[str, Section]:
        """Play conversations cold and warm, alone and together; then corrupt what is cached, and see it."""
        require_caching(server)
        if options.control:
            return {options.control: Player(server, options, seed=3).corrupted(options.control)}
        found = {
            "alone": Player(server, options).alone(options.conversations),
            "together": Player(server, options, seed=1).together(max(AT_ONCE, options.conversations // 5)),
            "aborted": Player(server, options, seed=2).aborted(max(2, options.conversations // 10)),
        }
        if controls_allowed(server):
            for kind in CACHED_CONTROLS:
                section = Player(server, options, seed=3).corrupted(kind)
                seen = bool(section.wrong)
                section.wrong = [] if seen else [f"wrong: {kind}: corruption of the cache is not seen"]
                section.counted["seen"] = seen
                found[kind] = section
        for name, section in found.items():
            options.say(f"{name}: {section.as_dict()}")
        return found

    def reference(self, name: str, server: Server, state: dict[str, Section], options: Options) -> None:
        """Play on a server that cuts prompts at odd places, and on one whose cache is too small."""
        if options.control:
            return
        if name == ODD:
            state[ODD] = Player(server, options, seed=4, cut_alike=True).alone(max(4, options.conversations // 4))
        else:
            state[SMALL] = section = Player(server, options, seed=5).together(
                max(8, options.conversations // 5), small=True
            )
            if not section.counted["preemptions"]:
                section.wrong.append("wrong: small: nothing was preempted, so nothing was tested")
        options.say(f"{name}: {state[name].as_dict()}")

    def verdict(self, state: dict[str, Section], options: Options) -> Verdict:  # noqa: ARG002
        """Conclude."""
        judged = [section for name, section in state.items() if name not in CACHED_CONTROLS] or list(state.values())
        total, same = sum(s.requests for s in judged), sum(s.same_bits for s in judged)
        wrong = tuple(finding for section in state.values() for finding in section.wrong)
        seen = [name for name, section in state.items() if section.counted.get("seen")]
        return Verdict(
            gate=NAME,
            passed=not wrong,
            summary=f"{sum(s.conversations for s in judged)} conversations, {total} requests, {same} the same bits, "
            f"{sum(s.ties for s in judged)} ties, {sum(s.reused for s in judged)} tokens reused, "
            f"{len(seen)} planted corruptions seen",
            figures={name: section.as_dict() for name, section in state.items()},
            findings=wrong,
        )


class Player:
    """Plays conversations on one server."""

    def __init__(self, server: Server, options: Options, *, seed: int = 0, cut_alike: bool = False) -> None:
        self._server = server
        self._options = options
        self._cut_alike = cut_alike
        self._tell = Paced(options.say)
        block = int(metrics.cache_config(server.metrics())["block_size"])
        context = server.context or LONGEST
        self._size = Size(block=block, longest=min(LONGEST, context - ANSWER))
        if self._size.longest <= 2 * block:
            raise ConfigError(
                f"{server.url} reuses blocks of {block} tokens and takes requests of {context}: a prefix of two blocks "
                f"does not fit, so nothing can be judged. Serve it with --context {4 * block} or more."
            )
        known = [server.complete(prompt, max_tokens=1).prompt for prompt in prompts.read()[: prompts.USUAL]]
        self._text = Text(list(itertools.chain(*known)), seed)
        self._meter = Meter(server)

    def alone(self, count: int) -> Section:
        """Play one request at a time; reuse and acceptance are judged, too."""
        section, drafting = Section(), _Drafting()
        for conversation in conversations.make(self._text, self._size, count):
            self._tell(f"prefix cache: alone, {section.conversations} of {count} conversations")
            asked, cold = self._cold(conversation)
            salt = uuid.uuid4().hex
            warm = [self._asked(prompt, salt) for prompt in asked]
            section.conversations += 1
            for number, prompt in enumerate(asked):
                label = f"{conversation.kind}, request {number + 1} of {len(prompt)} tokens"
                (before, cold_counts), (after, warm_counts) = cold[number], warm[number]
                # A prompt that is asked again goes on from where it was cut before.
                cut_alike = self._cut_alike or prompt in asked[:number] or not number
                padded = _is_padded(warm_counts, prompt)
                same = self._compare(section, label, before, after, bits=cut_alike and not padded)
                if same and cut_alike and not _same_drafts(cold_counts, warm_counts, prompt):
                    section.wrong.append(
                        f"wrong: {label}: the same tokens came of other drafts, {warm_counts.tau:.3f} a step warm and "
                        f"{cold_counts.tau:.3f} cold: the drafter does not see what the cache holds"
                    )
                drafting.add(cold_counts, warm_counts)
                least = conversations.reusable(asked, number, self._size.block)
                reused = after.cached
                if reused is not None and reused < least:
                    section.wrong.append(f"wrong: {label}: {reused} tokens were reused, {least} were there")
        section.reused = int(drafting.warm.hits)
        section.counted |= drafting.figures
        if drafting.cold.hits:
            section.wrong.append(f"wrong: cold requests reused {drafting.cold.hits:.0f} tokens")
        if not section.reused:
            section.wrong.append(f"wrong: {HITS} did not move, so nothing was tested")
        if drafting.loses:
            section.wrong.append(
                f"wrong: a verify step brings {drafting.warm.tau:.3f} tokens warm and {drafting.cold.tau:.3f} cold: "
                "the drafter does not see what the cache holds"
            )
        return section

    def together(self, count: int, *, small: bool = False) -> Section:
        """Play several conversations at once; half of them begin alike."""
        section = Section()
        kinds = [conversations.turns(self._text, self._size, 4) for _ in range(count)]
        played: list[tuple[list[Prompt], list[Answer]]] = []
        for kind in kinds:
            self._tell(f"prefix cache: together, {len(played)} of {count} conversations asked alone")
            asked, answered = self._cold(kind)
            played.append((asked, [answer for answer, _ in answered]))
        head = self._text.take(2 * self._size.block + 1)
        shared = [(*head, *self._text.take(self._size.block // 2)) for _ in range(count)]
        played += [([prompt], [self._ask(prompt, uuid.uuid4().hex)]) for prompt in shared]
        salt = uuid.uuid4().hex

        def again(number: int) -> list[Answer]:
            asked, _ = played[number]
            own = uuid.uuid4().hex if number < count else salt
            return [self._ask(prompt, own) for prompt in asked]

        order = self._text.rng.sample(range(2 * count), 2 * count)
        start = self._meter.read()
        with ThreadPoolExecutor(8 if small else AT_ONCE) as pool:
            warm = dict(zip(order, pool.map(again, order), strict=True))
        counts = self._meter.read() - start
        for number, (asked, cold) in enumerate(played):
            section.conversations += 1
            for i, prompt in enumerate(asked):
                label = f"together, request {i + 1} of {len(prompt)} tokens"
                self._compare(section, label, cold[i], warm[number][i], bits=False)
        section.reused = int(counts.hits)
        section.counted["preemptions"] = counts.preemptions
        if not section.reused:
            section.wrong.append(f"wrong: together: {HITS} did not move, so nothing was tested")
        return section

    def aborted(self, count: int) -> Section:
        """Leave in the middle of a prompt, then ask it to the end."""
        section = Section()
        for _ in range(count):
            prompt = self._text.take(self._size.longest)
            cold, salt = self._ask(prompt, uuid.uuid4().hex), uuid.uuid4().hex
            self._leave(prompt, salt)
            start = self._meter.read()
            warm = [self._ask(prompt, salt) for _ in range(2)]
            section.conversations += 1
            section.reused += int((self._meter.read() - start).hits)
            for answer in warm:
                self._compare(section, f"aborted, {len(prompt)} tokens", cold, answer, bits=False)
        return section

    def corrupted(self, kind: str) -> Section:
        """Ask again what is cached, with the cache corrupted; each under a salt that nobody uses afterwards.

        A corruption of the drafter's cache changes no token. It is seen by verify steps that went otherwise, which no
        honest repeat does: ``alone`` demands that.
        """
        section, drafting = Section(), _Drafting()
        for _ in range(CORRUPTED):
            prompt, salt = self._text.take(2 * self._size.block + 17), uuid.uuid4().hex
            cold, cold_counts = self._asked(prompt, salt)
            warm, warm_counts = self._asked(prompt, salt, thor_spec={"control": kind})
            section.conversations += 1
            drafting.add(cold_counts, warm_counts)
            if not self._compare(section, kind, cold, warm, bits=True):
                continue
            if not _same_drafts(cold_counts, warm_counts, prompt):
                section.wrong.append(f"wrong: {kind}: the same tokens came of other drafts warm than cold")
        section.counted |= drafting.figures
        section.reused = int(drafting.warm.hits)
        return section

    def _cold(self, conversation: Conversation) -> tuple[list[Prompt], list[tuple[Answer, Counted]]]:
        asked: list[Prompt] = []
        answers: list[tuple[Answer, Counted]] = []
        while (prompt := conversation.next([answer.tokens for answer, _ in answers])) is not None:
            asked.append(prompt)
            answers.append(self._asked(prompt, uuid.uuid4().hex))
        return asked, answers

    def _asked(self, prompt: Sequence[int], salt: str, **options: Any) -> tuple[Answer, Counted]:
        """Ask alone, and count."""
        before = self._meter.read()
        answer = self._ask(prompt, salt, **options)
        return answer, self._meter.read() - before

    def _ask(self, prompt: Sequence[int], salt: str, **options: Any) -> Answer:
        answer = self._server.complete(prompt, max_tokens=ANSWER, logprobs=1, cache_salt=salt, **options)
        self._meter.given(len(answer.tokens))
        return answer

    def _leave(self, prompt: Sequence[int], salt: str) -> None:
        body = self._server.body(prompt, max_tokens=ANSWER, stream=True, cache_salt=salt)
        timeout = httpx.Timeout(ABORT_AFTER_S, connect=5.0)
        with (
            contextlib.suppress(httpx.TimeoutException),  # the connection closes, and vLLM aborts the request
            self._server.stream("/v1/completions", body, timeout=timeout) as response,
        ):
            next(response.iter_bytes(), None)

    def _compare(self, section: Section, label: str, cold: Answer, warm: Answer, *, bits: bool) -> bool:
        """Return whether tokens were the same."""
        section.requests += 1
        at = first_difference(cold.tokens, warm.tokens)
        same = at == len(cold.tokens)
        if same and cold.logprobs == warm.logprobs:
            section.same_bits += 1
        elif bits:
            what = f"the log-probability of token {_first_other(cold, warm)}" if same else f"token {at}"
            section.wrong.append(f"wrong: {label}: {what} differs between cold and warm")
        elif not same:
            before = (*cold.prompt, *cold.tokens[:at])
            bound = gap_of_a_tie(self._server, before, self._options.tie_gap)
            (step,) = self._server.forced((*before, warm.tokens[at]), len(before))  # of several alike it may be any
            self._meter.given(1 + (self._options.tie_gap is None))  # each takes an answer of one token
            if step.gap <= bound:
                section.ties += 1
            else:
                section.wrong.append(
                    f"wrong: {label}: token {at} differs between cold and warm, and is no tie: it lies {step.gap:.4g} "
                    f"below the likeliest, a tie is at most {bound:.4g}"
                )
        return same


def _first_other(cold: Answer, warm: Answer) -> int:
    pairs = zip(cold.logprobs, warm.logprobs, strict=True)
    return next(place for place, (before, after) in enumerate(pairs) if before != after)


def _is_padded(warm: Counted, prompt: Prompt) -> bool:
    """Return whether one token of a prompt was left.

    vLLM has it verify drafts that are none, so as to keep the batch uniform: kernels of other shapes, other last bits.
    """
    return len(prompt) - warm.hits == 1


def _same_drafts(cold: Counted, warm: Counted, prompt: Prompt) -> bool:
    """Return whether every verify step went alike."""
    more = int(_is_padded(warm, prompt))
    return warm.accepted == cold.accepted and warm.drafts - cold.drafts in (0, more)


class _Drafting:
    """How far drafts went, cold and warm, request by request."""

    def __init__(self) -> None:
        self.cold, self.warm = Counted(), Counted()
        self._less: list[float] = []

    def add(self, cold: Counted, warm: Counted) -> None:
        """Take both passes of one request."""
        self.cold, self.warm = self.cold + cold, self.warm + warm
        self._less.append(cold.tau - warm.tau)

    @property
    def figures(self) -> dict[str, float]:
        """Return tokens per verify step."""
        return {"tau_cold": self.cold.tau, "tau_warm": self.warm.tau}

    @property
    def loses(self) -> bool:
        """Whether warm steps bring fewer tokens, by more than chance among the requests makes of nothing."""
        chance = statistics.stdev(self._less) / math.sqrt(len(self._less)) if len(self._less) > 1 else 0.0
        return self.cold.tau - self.warm.tau > max(LESS_ACCEPTED, STANDARD_ERRORS * chance)


def caches(server: Server) -> bool:
    """Return whether a server caches prefixes."""
    return metrics.cache_config(server.metrics()).get("enable_prefix_caching") == "True"


def require_caching(server: Server) -> None:
    """Raise ConfigError where a server reuses nothing."""
    if not caches(server):
        raise ConfigError(f"{server.url} caches no prefixes. Start it with -- --enable-prefix-caching.")


def odd_chunks(told: Mapping[str, str]) -> tuple[str, ...]:
    """Return the arguments of a server like the one that ``told``; its chunks of prompts are odd and below a block."""
    return ("--max-num-batched-tokens", str(int(told["block_size"]) * 5 // 8 | 1))


def small_cache(told: Mapping[str, str]) -> tuple[str, ...]:
    """Return the arguments of one whose cache holds less than two of the longest requests."""
    blocks = int(told["num_gpu_blocks"]) / float(told["kv_cache_max_concurrency"])
    return ("--num-gpu-blocks-override", str(math.ceil(1.6 * blocks)))


def controls_allowed(server: Server) -> bool:
    """Return whether requests may have corrupted what they are given from the cache."""
    try:
        asked = {"control": next(iter(CACHED_CONTROLS))}
        server.complete("x", max_tokens=1, cache_salt=uuid.uuid4().hex, thor_spec=asked)
    except ThorSpecError:
        return False
    return True
