"""Speculation changes no greedy token, but where two logits are equal within the resolution of bf16.

A verify step runs K + 1 tokens at once and a plain step one, through other operators, so the last bits of a bf16 logit
may differ. A difference in tokens is accepted only at such a tie, and every one is listed.
"""

import math
import statistics
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served

TOKENS = 64
VOCABULARY = 320
LAYERS = {"tiny-hybrid": 4, "tiny-dense": 3}
# On its way to the logits a value is rounded to bf16 about this often per layer: norms, projections, activations,
# mixer, gate, experts and residual sums, twice each.
ROUNDINGS_PER_LAYER = 10
UNIT_ROUNDOFF = 2.0**-9
SIGMAS = 4
PROMPTS = (
    "The river bends",
    "def area(width, height):",
    "Every morning Quinn walked",
    "What does a machine remember?",
    "- Check the voltage",
    '{"name": "kettle", "ready":',
    "Zoe's exam covered physics",
    "for name in sorted(names):",
    "The answer to 12 + 30 is",
    "A week has 7 days",
    "import os\nimport sys\n\n",
    "Dear Sir or Madam,",
    "Once upon a time",
    "1, 2, 3, 4,",
    "SELECT name FROM users",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "x",
    "If the light blinks twice,",
    "class Queue:\n    def __init__(self):",
    "In spring the water is high and brown. " * 12,
)


def post(served: Served, model: str, prompt: Any, **options: Any) -> Any:
    body = {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **options,
    }
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=300).raise_for_status()
    return answer.json()["choices"][0]


def logits(served: Served, model: str, prompt: list[int]) -> list[tuple[float, int]]:
    """Return the next token's logits after ``prompt``, largest first."""
    (top,) = post(served, model, prompt, max_tokens=1, logprobs=VOCABULARY)["logprobs"]["top_logprobs"]
    assert len(top) == VOCABULARY
    return sorted(((value, int(token.removeprefix("token_id:"))) for token, value in top.items()), reverse=True)


def tie_bound(found: list[tuple[float, int]], layers: int) -> float:
    """Return the gap below which two ways of computing bf16 logits may order them differently.

    Roundings add up like a random walk, relative to the spread of the logits; a gap has two logits of two computations
    each, hence the factor 2 on its standard deviation.
    """
    spread = statistics.pstdev(value for value, _ in found)
    return SIGMAS * 2 * UNIT_ROUNDOFF * math.sqrt(ROUNDINGS_PER_LAYER * layers) * spread


@pytest.mark.parametrize("pair", ["tiny-hybrid", "tiny-dense"])
def test_greedy_tokens_with_drafts_equal_those_without(
    pair: str, hybrid: Served, tmp_path_factory: pytest.TempPathFactory
) -> None:
    size = ("--context", "2048", "--kv-cache-memory", str(1 << 30))
    # Without prefix caching, which serve leaves off with a drafter: it keeps states in another mode.
    logits_too = ("--logprobs-mode", "raw_logits", "--max-logprobs", str(VOCABULARY))
    options = (*size, "--", "--no-enable-prefix-caching", *logits_too)

    def answers(served: Served) -> list[Any]:
        return [post(served, pair, prompt, max_tokens=TOKENS) for prompt in PROMPTS]

    if pair == "tiny-hybrid":
        drafted, accepted = answers(hybrid), hybrid.metric("vllm:spec_decode_num_accepted_tokens_total")
    else:
        runtime = tmp_path_factory.mktemp("locks")  # beside the session's server, which holds the usual ones
        with Served(tmp_path_factory.mktemp("drafted"), pair, *options, runtime=runtime) as served:
            drafted = answers(served.wait_ready())
            accepted = served.metric("vllm:spec_decode_num_accepted_tokens_total")
            assert served.stop() == 0
    assert accepted > 0

    runtime = tmp_path_factory.mktemp("locks")
    with Served(tmp_path_factory.mktemp("plain"), pair, "--draft", "none", *options, runtime=runtime) as served:
        plain = answers(served.wait_ready())
        assert served.metric("vllm:spec_decode_num_drafts_total") == 0
        ties, equal = [], 0
        for prompt, with_drafts, without in zip(PROMPTS, drafted, plain, strict=True):
            ours, theirs = with_drafts["token_ids"], without["token_ids"]
            assert len(ours) == len(theirs) == TOKENS
            same = next((i for i in range(TOKENS) if ours[i] != theirs[i]), TOKENS)
            equal += same
            if same < TOKENS:  # behind it the texts are different ones
                found = logits(served, pair, without["prompt_token_ids"] + theirs[:same])
                (high, first), (low, second), *_ = found
                bound = tie_bound(found, LAYERS[pair])
                ties.append(f"{prompt[:20]!r} token {same}: {first} and {second}, gap {high - low:.4f} <= {bound:.4f}")
                assert {ours[same], theirs[same]} == {first, second}, f"neither is the likeliest: {ties[-1]}"
                assert high - low <= bound, f"no tie: {ties[-1]}"
        assert served.stop() == 0
    print(f"{pair}: {equal} equal tokens in {len(PROMPTS)} answers, {len(ties)} near ties", *ties, sep="\n  ")
    # A corrupted state would end most answers early; ties are rare.
    assert equal >= 0.7 * TOKENS * len(PROMPTS)
