"""The gate over the prefix cache, against a server that reuses by the book, and one fault of it at a time."""

import itertools
import random
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from thor_spec.config import CACHED_CONTROLS
from thor_spec.errors import ConfigError, ThorSpecError
from thor_spec.gates import conversations, counted, prefix_cache
from thor_spec.gates.conversations import Conversation, Size, Text
from thor_spec.gates.gate import Options
from thor_spec.gates.judging import Derived, Subject, judge
from thor_spec.gates.prefix_cache import ODD, SMALL, PrefixCache
from thor_spec.gates.verdict import Verdict
from thor_spec.serve.client import Answer, Forced

BLOCK = 16
OPTIONS = Options(conversations=12, tie_gap=0.1)


class Model:
    """Greedy tokens that hang on the whole prompt; reuse to the last boundary that a prompt of the salt left."""

    url = "fake"

    def __init__(self, fault: str = "", *, controls: bool = True, context: int = 160) -> None:
        self.fault = fault
        self.controls = controls
        self.context = context
        self.hits = self.drafts = self.preemptions = self.generated = self.behind = 0
        self.accepted = [0, 0]
        self.left: dict[str, list[tuple[int, ...]]] = {}
        self.rng = random.Random(0)

    def metrics(self) -> str:
        caching = self.fault != "off"
        counts = {
            "prefix_cache_hits": self.hits,
            "spec_decode_num_drafts": self.drafts,
            "num_preemptions": self.preemptions,
            "generation_tokens": self.generated - self.behind,
        }
        self.behind = 0
        lines = [f"# TYPE vllm:{name} counter\nvllm:{name}_total {value}" for name, value in counts.items()]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        lines.append(f"# TYPE {name} counter")
        lines += [f'{name}_total{{position="{place}"}} {value}' for place, value in enumerate(self.accepted)]
        labels = (
            f'block_size="{BLOCK}",enable_prefix_caching="{caching}",num_gpu_blocks="80",kv_cache_max_concurrency="8"'
        )
        return "\n".join([*lines, f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{labels}}} 1", ""])

    def visit(self, look: Any) -> Any:
        return look(self)

    def body(self, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
        return {"prompt": list(prompt), **options}

    @contextmanager
    def stream(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        assert path == "/v1/completions"
        assert body["cache_salt"]
        assert options["timeout"]

        class Response:
            def iter_bytes(self) -> Any:
                return iter([b"x"])

        yield Response()

    def complete(
        self, prompt: Any, *, max_tokens: int, cache_salt: str = "", thor_spec: Any = None, **_: Any
    ) -> Answer:
        if thor_spec and not self.controls:
            raise ThorSpecError("no controls")
        prompt = tuple(prompt.encode() if isinstance(prompt, str) else prompt)
        reused = self._reuse(prompt, cache_salt)
        self.left.setdefault(cache_salt, []).append(prompt)
        self.hits += reused
        warm, padded = reused > 0, len(prompt) - reused == 1
        kind = (thor_spec or {}).get("control", "")
        rng = random.Random(repr(prompt))
        tokens = [rng.randrange(256) for _ in range(max_tokens)]
        logprobs = [-rng.random() for _ in tokens]
        if warm and (self.fault in ("token", "tie") or kind in ("cached-state", "cached-keys")):
            tokens[1:] = [999] * (max_tokens - 1)
        if padded and self.fault == "padded token":
            tokens[1:] = [999] * (max_tokens - 1)
        if (warm and (self.fault == "bits" or kind == "cached-window")) or (padded and self.fault == "padded bits"):
            logprobs[0] -= 1e-6
        self._draft(rng, warm, kind)
        self.drafts += padded and warm  # drafts that are none, so that all rows are as wide
        self.generated += max_tokens * (self.fault != "uncounted")
        self.behind = max_tokens  # until somebody has looked once
        self.preemptions += self.fault != "roomy"
        return Answer(
            prompt=prompt, tokens=tuple(tokens), text="", finish="length", rule="", logprobs=tuple(logprobs),
            cached=reused,
        )  # fmt: skip

    def forced(self, tokens: Sequence[int], start: int) -> list[Forced]:
        """Say that any token is likely where there are ties, though none is among the likeliest two."""
        self.generated += 1
        below = 0.05 if self.fault == "tie" else 1.0
        return [Forced(token, -1.0 - below, ((0, -1.0),)) for token in tokens[start:]]

    def _draft(self, rng: random.Random, warm: bool, kind: str) -> None:
        self.drafts += 10
        accepted = [9, 4 + rng.randint(0, 4)]
        if warm and self.fault == "rounding":  # other drafts, no better and no worse
            accepted[1] = 4 + self.rng.randint(0, 4)
        if warm and self.fault == "acceptance":
            accepted[1] -= 3
        if warm and (self.fault == "drafts" or (kind == "cached-drafts" and self.fault != "blind")):
            accepted = [8, accepted[1] + 1]  # as many tokens by as many steps, from other places
        self.accepted = [a + b for a, b in zip(self.accepted, accepted, strict=True)]

    def _reuse(self, prompt: tuple[int, ...], salt: str) -> int:
        if self.fault == "nothing":
            return 0
        before = [q for salt_, left in self.left.items() if salt_ == salt or self.fault == "leak" for q in left]
        found = conversations.reusable([*before, prompt], len(before), BLOCK)
        return max(0, found - BLOCK) if self.fault == "lost" else found


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake counts at the second look."""
    for name, seconds in (("POLL_S", 0.0), ("QUIET_S", 0.0), ("PATIENCE_S", 0.2)):
        monkeypatch.setattr(counted, name, seconds)


def verdict(model: Model, options: Options = OPTIONS, *, small: Model | None = None) -> Verdict:
    references = {ODD: Model(), SMALL: small or Model()}
    (found,) = judge([PrefixCache()], Subject(candidate=model, references=references), options)  # type: ignore[arg-type]
    return found


def test_green_and_every_control_is_seen() -> None:
    found = verdict(Model())
    assert found.passed, found.as_text()
    assert all(found.figures[kind]["seen"] for kind in CACHED_CONTROLS)
    assert found.figures["alone"]["same_bits"] == found.figures["alone"]["requests"]
    assert {"alone", "together", "aborted", ODD, SMALL} <= set(found.figures)
    assert "4 planted corruptions seen" in found.summary


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("token", "differs between cold and warm"),
        ("padded token", "is no tie"),
        ("bits", "the log-probability of token 0 differs between cold and warm"),
        ("lost", "tokens were reused, "),
        ("leak", "cold requests reused"),
        ("nothing", "did not move, so nothing was tested"),
        ("acceptance", "a verify step brings"),
        ("drafts", "the same tokens came of other drafts"),
        ("blind", "cached-drafts: corruption of the cache is not seen"),
    ],
)
def test_red(fault: str, says: str) -> None:
    found = verdict(Model(fault))
    assert not found.passed
    assert any(says in finding for finding in found.findings), found.findings


def test_a_prompt_of_which_one_token_is_left_may_round_otherwise() -> None:
    found = verdict(Model("padded bits"))
    assert found.passed, found.as_text()
    assert found.figures["alone"]["same_bits"] < found.figures["alone"]["requests"]


def test_a_tie_passes_only_where_prompts_were_cut_differently() -> None:
    found = verdict(Model("tie"))
    assert found.figures["alone"]["ties"] > 0
    assert found.figures["together"]["ties"] > 0
    assert all(finding.startswith("wrong: repeat") for finding in found.findings)


def test_a_cache_that_is_large_enough_tests_nothing() -> None:
    found = verdict(Model(), small=Model("roomy"))
    assert found.findings == ("wrong: small: nothing was preempted, so nothing was tested",)


def test_other_drafts_that_are_as_good_pass_where_prompts_were_cut_differently() -> None:
    """Rounding differs there; the mean must lie below the cold one by more than chance."""
    found = verdict(Model("rounding"))
    assert found.figures["alone"]["tau_warm"] != found.figures["alone"]["tau_cold"]
    assert all(finding.startswith("wrong: repeat") for finding in found.findings)


def test_an_answer_is_counted_before_the_next_is_asked() -> None:
    with pytest.raises(ThorSpecError, match="nothing can be read off its metrics"):
        verdict(Model("uncounted"))


@pytest.mark.parametrize("kind", CACHED_CONTROLS)
def test_one_control_turns_it_red(kind: str) -> None:
    found = verdict(Model(), Options(control=kind))
    assert not found.passed
    assert set(found.figures) == {kind}


def test_without_controls_the_rest_is_judged() -> None:
    found = verdict(Model(controls=False))
    assert found.passed
    assert not set(CACHED_CONTROLS) & set(found.figures)


@pytest.mark.parametrize(("model", "says"), [(Model("off"), "caches no prefixes"), (Model(context=40), "does not fit")])
def test_what_cannot_be_judged(model: Model, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        verdict(model)


def test_references_follow_from_what_the_candidate_tells() -> None:
    seen: list[tuple[str, ...]] = []

    def small(told: Any) -> Any:
        seen.append((*prefix_cache.odd_chunks(told), *prefix_cache.small_cache(told)))
        return Model()

    judge([PrefixCache()], Subject(candidate=Model(), references={SMALL: Derived(small)}), OPTIONS)  # type: ignore[arg-type]
    assert seen == [("--max-num-batched-tokens", "11", "--num-gpu-blocks-override", "16")]


def played(conversation: Conversation) -> list[tuple[int, ...]]:
    asked: list[tuple[int, ...]] = []
    while (prompt := conversation.next([[7] * 24] * len(asked))) is not None:
        asked.append(prompt)
    return asked


def test_conversations_share_beginnings_of_every_kind() -> None:
    size = Size(block=BLOCK, longest=400)
    made = [(c.kind, played(c)) for c in conversations.make(Text(range(1000), 0), size, 40)]
    assert {kind for kind, _ in made} == {"repeat", "partial", "branch", "turns"}
    assert any(len(asked) == 12 for _, asked in made)
    for kind, asked in made:
        assert all(0 < len(prompt) <= size.longest for prompt in asked)
        assert len(asked) > 1
        if kind == "turns":
            assert all(later[: len(before)] == before for before, later in itertools.pairwise(asked))
    lengths = {len(asked[0]) % BLOCK for _, asked in made}
    assert {0, 1, BLOCK - 1} <= lengths
    assert [c.next([]) for c in conversations.make(Text(range(1000), 0), size, 5)] == [
        asked[0] for _, asked in made[:5]
    ]


def test_what_must_be_reusable() -> None:
    long = tuple(range(100))
    asked = [long[:40], long[:40], long[:50], long[:33], (5, *long), long[:32]]
    assert [conversations.reusable(asked, n, 16) for n in range(6)] == [0, 32, 32, 32, 0, 0]
