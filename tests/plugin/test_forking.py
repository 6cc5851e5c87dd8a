"""Engines of the CPU build are forked; everything else that vLLM starts goes by vLLM's own method."""

from typing import Any

import pytest

from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.forking import forked


def method() -> str:
    context: Any = compat.ENGINE_PROCESSES.module().get_mp_context()
    return str(context.get_start_method())


@pytest.mark.parametrize("fails", [False, True])
def test_engines_alone_are_forked(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's CPU platform has it
    seen: list[Any] = []

    def stock(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((method(), args, kwargs))
        if fails:
            raise RuntimeError

    try:
        forked(stock)(None, 1, log_stats=True)
    except RuntimeError:
        assert fails
    assert seen == [("fork", (1,), {"log_stats": True})]
    assert method() == "spawn"
