"""Our speculator in the place of vLLM's: the runner makes one before it asks any class of ours."""

import sys
from typing import Any

from thor_spec.vllm_plugin import compat, receipt


def install() -> None:
    """Have the runner ask us first. Safe to call again; imports nothing heavy until there is a speculator to make."""
    stock = compat.INIT_SPECULATOR.resolve()
    if hasattr(stock, "stock"):
        return

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        with receipt.of_failure():
            from thor_spec.vllm_plugin.tree import choice

            shape = choice.shape(vllm_config)
            if shape is not None:
                choice.require(vllm_config, shape)
                from thor_spec.vllm_plugin.tree.speculator import TreeSpeculator

                if shape.auto:
                    from thor_spec.vllm_plugin.tree import runner

                    runner.install()
                return TreeSpeculator(vllm_config, device, shape)
        return stock(vllm_config, device, req_states)

    init_speculator.stock = stock  # type: ignore[attr-defined]
    runner = compat.MODEL_RUNNER.target.partition(":")[0]  # which imports the function by name
    modules: tuple[Any, ...] = (compat.INIT_SPECULATOR.module(), sys.modules.get(runner))
    for module in modules:
        if module is not None:
            module.init_speculator = init_speculator
