"""Speculation changes no greedy token, but where two logits are equal within bf16's resolution.

A verify step runs K + 1 tokens at once and a plain step one, so products are summed in another order and the last bits
of a bf16 logit may differ. A difference in tokens is accepted only at such a tie, and every one is listed.
"""

import math
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served

TOKENS = 64
# Units in the last place of a bf16 logit that two ways of computing it may differ by: see `noise` below.
TIE_ULPS = 4
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
    "Keep the fan clear of dust;",
    "\n\n",
)


@dataclass(frozen=True)
class Step:
    """One greedy token with the two largest logits."""

    token: int
    top: tuple[tuple[int, float], ...]


def greedy(served: Served, model: str, prompt: str) -> list[Step]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
    }
    found: Any = httpx.post(f"{served.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    logprobs = found["choices"][0]["logprobs"]
    steps = []
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        pairs = sorted(((int(t.removeprefix("token_id:")), v) for t, v in top.items()), key=lambda p: -p[1])
        steps.append(Step(int(token.removeprefix("token_id:")), tuple(pairs[:2])))
    return steps


def ulp(logit: float) -> float:
    """Return the spacing of bf16 numbers (8 significant bits) at ``logit``."""
    return float(2.0 ** (math.floor(math.log2(abs(logit))) - 7)) if logit else 2.0**-133


@pytest.mark.parametrize("pair", ["tiny-hybrid", "tiny-dense"])
def test_greedy_tokens_with_drafts_equal_those_without(
    pair: str, hybrid: Served, tmp_path_factory: pytest.TempPathFactory, record_property: Any
) -> None:
    options = ("--context", "2048", "--", "--logprobs-mode", "raw_logits")
    plain_options = ("--draft", "none", *options)

    def answers(served: Served) -> list[list[Step]]:
        return [greedy(served, pair, prompt) for prompt in PROMPTS]

    if pair == "tiny-hybrid":
        drafted = answers(hybrid)
        accepted = hybrid.metric("vllm:spec_decode_num_accepted_tokens_total")
    else:
        with Served(tmp_path_factory.mktemp("drafted"), pair, *options) as served:
            drafted = answers(served.wait_ready())
            accepted = served.metric("vllm:spec_decode_num_accepted_tokens_total")
            assert served.stop() == 0
    runtime = tmp_path_factory.mktemp("own-locks")  # beside the session's server, which holds the usual ones
    with Served(tmp_path_factory.mktemp("plain"), pair, *plain_options, runtime=runtime) as served:
        plain = answers(served.wait_ready())
        assert served.metric("vllm:spec_decode_num_drafts_total") == 0
        assert served.stop() == 0

    assert accepted > 0
    ties, equal, noise = [], 0, 0.0
    for prompt, with_drafts, without in zip(PROMPTS, drafted, plain, strict=True):
        for i, (ours, theirs) in enumerate(zip(with_drafts, without, strict=True)):
            if ours.token != theirs.token:
                (first, high), (second, low) = theirs.top
                gap = (high - low) / ulp(high)
                ties.append(f"{prompt[:20]!r} token {i}: {first} {high} / {second} {low}, {gap:.1f} ulp")
                assert {ours.token, theirs.token} == {first, second}, ties[-1]
                assert gap <= TIE_ULPS, f"not a tie: {ties[-1]}"
                break  # from here on the texts are different ones
            equal += 1
            noise = max(noise, abs(ours.top[0][1] - theirs.top[0][1]) / ulp(theirs.top[0][1]))
    print(
        f"{pair}: {equal} equal tokens, {len(ties)} near ties, logits differ by at most {noise:.1f} ulp",
        *ties,
        sep="\n",
    )
    record_property("equal_tokens", equal)
    record_property("near_ties", ties)
    assert noise <= TIE_ULPS / 2, "two logits may each be off by this much before a tie can flip"
