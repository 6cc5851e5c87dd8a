"""What the drafter's cache is spared costs no token: the target verifies all the same, in blocks that are its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.state import small
from tests.state.test_engine import case, run
from thor_spec.capacity.plan import Request, make
from thor_spec.capacity.shape import ModelShape
from thor_spec.vllm_plugin import seam

pytestmark = pytest.mark.skipif(
    seam.has_gpu_build(), reason="not run: sized for a CPU; benchmarks/state.py is for GPUs"
)
WINDOW, CONTEXT = 32, 1024
COMMON = {"requests": 16, "drafts": 5, "eager": True, "speculation": {}, "longest_prompt": 600, "longest_answer": 96,
          "options": {"drafter_window": WINDOW}, "seed": 3}  # fmt: skip
CASES = (
    {"caching": False, "budget": 96, "cache_bytes": 15 * 65536},
    {"caching": True, "budget": 288, "cache_bytes": 16 << 20, "rounds": 2},
)
TIE = 0.05
"""Logits that are closer may change places: the engine computes in bfloat16, the reference in float32."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A drafter of twice the target's KV heads."""
    return small.make(tmp_path_factory.mktemp("small"), 64, drafter_kv_heads=2)


@pytest.fixture(scope="module")
def ran(pair: tuple[Path, Path]) -> list[Any]:
    return run(*(case(pair, COMMON, each) for each in CASES))


def test_every_token_is_the_target_s(pair: tuple[Path, Path], ran: list[Any]) -> None:
    """Of greedy requests, after prompts of many times the window; the target alone has never seen a draft."""
    import torch

    from thor_spec.nano import target

    model = target.load(pair[0])

    def worst(prompt: list[int], answer: list[int]) -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return float((logits.amax(-1) - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]).max())

    for each in ran:
        greedy = list(zip(each["prompts"], each["tokens"], strict=True))[::2]
        assert sum(len(prompt) > 4 * WINDOW for prompt, _ in greedy) >= 4
        print([round(worst(*one), 4) for one in greedy])
        assert max(worst(*one) for one in greedy) < TIE
        prompt, answer = greedy[0]
        assert worst(prompt, [*answer[:-1], (answer[-1] + 1) % 256]) > TIE  # it can tell


def test_there_were_drafts_preemptions_and_hits(ran: list[Any]) -> None:
    off, on = (each["counts"] for each in ran)
    print(off, on)
    assert min(off["spec_decode_num_accepted_tokens"], on["spec_decode_num_accepted_tokens"]) > 50
    assert off["num_preemptions"] > 0
    assert on["prefix_cache_hits"] > 0


def test_the_plan_is_what_vllm_reports(pair: tuple[Path, Path], ran: list[Any]) -> None:
    target, drafter = (ModelShape.parse(path.name, json.loads((path / "config.json").read_text())) for path in pair)
    for each, found in zip(CASES, ran, strict=True):
        plan = make(
            Request(
                memory=1 << 34, context=CONTEXT, draft_tokens=5, drafter_window=WINDOW, engine="cpu",
                batched_tokens=each["budget"], kv_cache_memory=each["cache_bytes"], prefix_caching=each["caching"],
            ),
            target,
            drafter,
        )  # fmt: skip
        assert [plan.tokens, plan.sequences] == found["reported"]
