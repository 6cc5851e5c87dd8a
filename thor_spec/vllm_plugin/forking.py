"""The engine of the CPU build is forked, and does not import vLLM once more: 8 of 31 s of a start.

vLLM spawns all processes there, since OpenMP is bound by variables that a library reads when it is loaded. That is so
for workers, which are spawned still; the engine itself computes nothing.
"""

import multiprocessing
from collections.abc import Callable
from typing import Any

from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.options import NAME


def install() -> None:
    """Have engines forked. Safe to call again."""
    compat.ENGINE_PROCESSES.wrap(forked)


def forked(stock: Callable[..., None]) -> Callable[..., None]:
    """Return ``CoreEngineProcManager.__init__``, which forks."""

    def init(self: Any, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        module = compat.ENGINE_PROCESSES.module()
        usual = module.get_mp_context
        if NAME in (vllm_config.additional_config or {}):
            module.get_mp_context = lambda: multiprocessing.get_context("fork")
        try:
            stock(self, *args, vllm_config=vllm_config, **kwargs)
        finally:
            module.get_mp_context = usual

    return init
