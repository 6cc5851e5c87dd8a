"""Engines of the CPU build are forked; everything else that vLLM starts goes by vLLM's own method."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.forking import forked
from thor_spec.vllm_plugin.options import NAME


def method() -> str:
    context: Any = compat.ENGINE_PROCESSES.module().get_mp_context()
    return str(context.get_start_method())


@pytest.mark.parametrize(("ours", "expected"), [({NAME: {}}, "fork"), ({}, "spawn"), (None, "spawn")])
@pytest.mark.parametrize("fails", [False, True])
def test_our_engines_alone_are_forked(
    monkeypatch: pytest.MonkeyPatch, fails: bool, ours: dict[str, Any] | None, expected: str
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's CPU platform has it
    config = SimpleNamespace(additional_config=ours)
    seen: list[Any] = []

    def stock(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((method(), args, kwargs))
        if fails:
            raise RuntimeError

    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        forked(stock)(None, 1, vllm_config=config)
    assert seen == [(expected, (1,), {"vllm_config": config})]
    assert method() == "spawn"
