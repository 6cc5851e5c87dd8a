"""When a start caches prefixes: after the gate was green for the very same numbers."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from thor_spec.config import ServeConfig
from thor_spec.serve import prefix_caching

from .conftest import Make, value

CHANGES_NUMBERS: dict[str, Any] = {
    "draft_tokens": 3,
    "tree": "7,3",
    "adaptive_drafts": True,
    "state": "snapshot",
    "gdn_kernel": "replay",
    "drafter_window": 64,
    "rope": "yarn",
    "environment": {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"},
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "data_parallel": 2,
    "vllm_args": ("--max-num-batched-tokens", "96"),
}
WITH_ANOTHER = {"rope_native", "rope_factor", "rope_factors", "rope_drafter", "nnodes", "node_rank", "master_addr"}
OF_DIFFUSION = {"mode", "threshold", "edit_threshold", "max_denoise_steps"}
"""Models without drafts, whose caching vLLM decides."""
CHANGES_NO_NUMBER = {
    "host", "port", "api_key", "api_key_file", "insecure", "max_request_bytes", "context", "max_seqs",
    "kv_cache_memory", "memory_floor", "accept", "accept_eps", "accept_delta", "canary", "dummy_weights",
    "synthetic_acceptance", "acceptance_floor", "golden", "allow_controls", "record", "record_contents", "log_file",
    "wait", "executor",
}  # fmt: skip
"""Among them what only says which tokens are taken, or how much fits."""


@pytest.mark.parametrize("option", CHANGES_NUMBERS)
def test_a_green_gate_is_no_word_about_another_start(
    option: str, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sorted_out = {*CHANGES_NUMBERS, *WITH_ANOTHER, *OF_DIFFUSION, *CHANGES_NO_NUMBER, "model", "draft"}
    assert sorted_out == {field.name for field in fields(ServeConfig)}
    monkeypatch.setenv("THOR_SPEC_STATE_DIR", str(tmp_path))
    plan = make()
    assert plan.drafter
    prefix_caching.remember(
        plan.resolved.config, plan.target, plan.drafter, plan.draft_tokens, passed=True, utc="2026-01-02"
    )
    assert make().prefix_caching.on
    config = replace(plan.resolved.config, **{option: CHANGES_NUMBERS[option]})
    assert not prefix_caching.decide(
        config, plan.target, plan.drafter, 3 if option == "draft_tokens" else plan.draft_tokens
    ).on


def test_prefixes_are_cached_after_the_gate_was_green(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("THOR_SPEC_STATE_DIR", str(tmp_path))
    plan = make()
    assert not plan.prefix_caching.on
    assert "not checked here" in plan.prefix_caching.why
    assert "--no-enable-prefix-caching" in plan.argv

    def remember(*, passed: bool) -> None:
        assert plan.drafter
        prefix_caching.remember(
            plan.resolved.config, plan.target, plan.drafter, plan.draft_tokens, passed=passed, utc="2026-01-02"
        )

    remember(passed=True)
    assert make().prefix_caching.described == "on (`verify prefix-cache` was green on 2026-01-02)"
    assert "--enable-prefix-caching" in make().argv
    assert value(make(), "--prefix-cache-retention-interval") == "0"
    assert make(port=9000, max_seqs=2, vllm_args=("--seed", "3")).prefix_caching.on
    assert not make(allow_controls=True).prefix_caching.on
    declined = make(vllm_args=("--no-enable-prefix-caching",))
    assert (declined.prefix_caching.why, declined.argv.count("--no-enable-prefix-caching")) == ("declined", 1)
    remember(passed=False)
    assert make().prefix_caching.described == "off (`verify prefix-cache` was red on 2026-01-02)"
