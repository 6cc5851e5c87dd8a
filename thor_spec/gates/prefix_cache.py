"""Gate: what comes from the prefix cache changes nothing.

Cold and warm are compared in one mode, on one server: a request under a ``cache_salt`` of its own finds nothing in the
cache, the same request under the salt of its conversation finds what the earlier ones left. Against a server without
the cache nothing could be compared bit by bit, since the engine then keeps its states in another mode.
"""

import contextlib
import itertools
import math
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
from thor_spec.gates.gate import Options
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
"""Tokens per verify step that the warm pass may lie below the cold one."""
ABORT_AFTER_S = 0.05
HITS = "vllm:prefix_cache_hits_total"
PREEMPTIONS = "vllm:num_preemptions_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


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
        block = int(metrics.cache_config(server.metrics())["block_size"])
        context = server.context or LONGEST
        self._size = Size(block=block, longest=min(LONGEST, context - ANSWER))
        if self._size.longest <= 2 * block:
            raise ConfigError(
                f"{server.url} reuses blocks of {block} tokens and takes requests of {context}: a prefix of two blocks "
                f"does not fit, so nothing can be judged. Serve it with --context {4 * block} or more."
            )
        known = [server.complete(prompt, max_tokens=1).prompt for prompt in prompts.read()]
        self._text = Text(list(itertools.chain(*known)), seed)

    def alone(self, count: int) -> Section:
        """Play one request at a time; reuse and acceptance are judged, too."""
        section, cold_counts, warm_counts = Section(), _Counts(), _Counts()
        for conversation in conversations.make(self._text, self._size, count):
            with cold_counts.of(self._server):
                asked, cold = self._cold(conversation)
            salt = uuid.uuid4().hex
            with warm_counts.of(self._server):
                warm = [self._ask(prompt, salt) for prompt in asked]
            section.conversations += 1
            for number, prompt in enumerate(asked):
                label = f"{conversation.kind}, request {number + 1} of {len(prompt)} tokens"
                # A prompt that is asked again goes on from where it was cut before.
                cut_alike = self._cut_alike or prompt in asked[:number] or not number
                self._compare(section, label, cold[number], warm[number], bits=cut_alike)
                least = conversations.reusable(asked, number, self._size.block)
                reused = warm[number].cached
                if reused is not None and reused < least:
                    section.wrong.append(f"wrong: {label}: {reused} tokens were reused, {least} were there")
        section.reused = int(warm_counts.seen[HITS])
        section.counted |= {"tau_cold": cold_counts.tau, "tau_warm": warm_counts.tau}
        if cold_counts.seen[HITS]:
            section.wrong.append(f"wrong: cold requests reused {cold_counts.seen[HITS]:.0f} tokens")
        if not section.reused:
            section.wrong.append(f"wrong: {HITS} did not move, so nothing was tested")
        if warm_counts.tau < cold_counts.tau - LESS_ACCEPTED:
            section.wrong.append(
                f"wrong: a verify step brings {warm_counts.tau:.3f} tokens warm and {cold_counts.tau:.3f} cold: the "
                "drafter does not see what the cache holds"
            )
        return section

    def together(self, count: int, *, small: bool = False) -> Section:
        """Play several conversations at once; half of them begin alike."""
        section, counts = Section(), _Counts()
        kinds = [conversations.turns(self._text, self._size, 4) for _ in range(count)]
        played = [self._cold(conversation) for conversation in kinds]
        head = self._text.take(2 * self._size.block + 1)
        shared = [(*head, *self._text.take(self._size.block // 2)) for _ in range(count)]
        played += [([prompt], [self._ask(prompt, uuid.uuid4().hex)]) for prompt in shared]
        salt = uuid.uuid4().hex

        def again(number: int) -> list[Answer]:
            asked, _ = played[number]
            own = uuid.uuid4().hex if number < count else salt
            return [self._ask(prompt, own) for prompt in asked]

        order = self._text.rng.sample(range(2 * count), 2 * count)
        with counts.of(self._server), ThreadPoolExecutor(8 if small else AT_ONCE) as pool:
            warm = dict(zip(order, pool.map(again, order), strict=True))
        for number, (asked, cold) in enumerate(played):
            section.conversations += 1
            for i, prompt in enumerate(asked):
                label = f"together, request {i + 1} of {len(prompt)} tokens"
                self._compare(section, label, cold[i], warm[number][i], bits=False)
        section.reused = int(counts.seen[HITS])
        section.counted["preemptions"] = counts.seen[PREEMPTIONS]
        if not section.reused:
            section.wrong.append(f"wrong: together: {HITS} did not move, so nothing was tested")
        return section

    def aborted(self, count: int) -> Section:
        """Leave in the middle of a prompt, then ask it to the end."""
        section, counts = Section(), _Counts()
        for _ in range(count):
            prompt = self._text.take(self._size.longest)
            cold, salt = self._ask(prompt, uuid.uuid4().hex), uuid.uuid4().hex
            self._leave(prompt, salt)
            with counts.of(self._server):
                warm = [self._ask(prompt, salt) for _ in range(2)]
            section.conversations += 1
            for answer in warm:
                self._compare(section, f"aborted, {len(prompt)} tokens", cold, answer, bits=False)
        section.reused = int(counts.seen[HITS])
        return section

    def corrupted(self, kind: str) -> Section:
        """Ask again what is cached, with the cache corrupted; each under a salt that nobody uses afterwards."""
        section, cold_counts, warm_counts = Section(), _Counts(), _Counts()
        for _ in range(8 if kind == "cached-drafts" else 3):  # acceptance is a mean, and needs more
            prompt, salt = self._text.take(2 * self._size.block + 17), uuid.uuid4().hex
            with cold_counts.of(self._server):
                cold = self._ask(prompt, salt)
            with warm_counts.of(self._server):
                warm = self._ask(prompt, salt, thor_spec={"control": kind})
            section.conversations += 1
            self._compare(section, kind, cold, warm, bits=True)
        section.counted |= {"tau_cold": cold_counts.tau, "tau_warm": warm_counts.tau}
        section.reused = int(warm_counts.seen[HITS])
        if warm_counts.tau < cold_counts.tau - LESS_ACCEPTED:
            section.wrong.append(
                f"wrong: {kind}: {warm_counts.tau:.3f} tokens per verify step warm, {cold_counts.tau:.3f} cold"
            )
        return section

    def _cold(self, conversation: Conversation) -> tuple[list[Prompt], list[Answer]]:
        asked: list[Prompt] = []
        answers: list[Answer] = []
        while (prompt := conversation.next([answer.tokens for answer in answers])) is not None:
            asked.append(prompt)
            answers.append(self._ask(prompt, uuid.uuid4().hex))
        return asked, answers

    def _ask(self, prompt: Sequence[int], salt: str, **options: Any) -> Answer:
        return self._server.complete(prompt, max_tokens=ANSWER, logprobs=2, cache_salt=salt, **options)

    def _leave(self, prompt: Sequence[int], salt: str) -> None:
        body = self._server.body(prompt, max_tokens=ANSWER, stream=True, cache_salt=salt)
        timeout = httpx.Timeout(ABORT_AFTER_S, connect=5.0)
        with (
            contextlib.suppress(httpx.TimeoutException),  # the connection closes, and vLLM aborts the request
            self._server.stream("/v1/completions", body, timeout=timeout) as response,
        ):
            next(response.iter_bytes(), None)

    def _compare(self, section: Section, label: str, cold: Answer, warm: Answer, *, bits: bool) -> None:
        section.requests += 1
        if cold.tokens == warm.tokens and cold.logprobs == warm.logprobs:
            section.same_bits += 1
            return
        at = first_difference(cold.tokens, warm.tokens)
        if at == len(cold.tokens) and not bits:
            return
        if bits:
            what = f"token {at}" if at < len(cold.tokens) else "a log-probability"
            section.wrong.append(f"wrong: {label}: {what} differs between cold and warm")
            return
        bound = gap_of_a_tie(self._server, (*cold.prompt, *cold.tokens[:at]), self._options.tie_gap)
        if cold.logprobs[at] - dict(cold.top[at]).get(warm.tokens[at], -math.inf) <= bound:
            section.ties += 1
        else:
            section.wrong.append(f"wrong: {label}: token {at} differs between cold and warm, and is no tie")


class _Counts:
    """What the server counts while somebody looks."""

    def __init__(self) -> None:
        self.seen = dict.fromkeys((HITS, PREEMPTIONS, DRAFTS, ACCEPTED), 0.0)

    def of(self, server: Server) -> "_Looking":
        return _Looking(self, server)

    @property
    def tau(self) -> float:
        """Tokens per verify step."""
        return round(1 + self.seen[ACCEPTED] / self.seen[DRAFTS], 4) if self.seen[DRAFTS] else 0.0


class _Looking:
    def __init__(self, counts: _Counts, server: Server) -> None:
        self._counts, self._server = counts, server

    def __enter__(self) -> None:
        self._before = metrics.totals(self._server.metrics())

    def __exit__(self, *_: object) -> None:
        after = metrics.totals(self._server.metrics())
        for name in self._counts.seen:
            self._counts.seen[name] += after.get(name, 0.0) - self._before.get(name, 0.0)


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
