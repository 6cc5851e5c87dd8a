"""Our per-request model state in vLLM's V2 runner: the place from which every runner hook is reached."""

import os
from typing import Any

from thor_spec.vllm_plugin import compat, cpu_verify, receipt
from thor_spec.vllm_plugin.options import PluginOptions
from thor_spec.vllm_plugin.seam import has_gpu_build, version

_Default: Any = compat.DEFAULT_MODEL_STATE.resolve()
_Hybrid: Any = compat.HYBRID_MODEL_STATE.resolve()


class _Activated:
    """Reads the plugin's options, applies them, and leaves the engine's receipt."""

    def __init__(self, vllm_config: Any, *args: Any) -> None:
        with receipt.of_failure():
            self.options = PluginOptions.parse(vllm_config.additional_config)
            super().__init__(vllm_config, *args)  # type: ignore[call-arg]  # stands before vLLM's class in every use
            if not has_gpu_build():
                cpu_verify.install()
            replaced: tuple[str, ...] = ()
            if self.options.runner_kernels == "torch":
                from thor_spec.vllm_plugin import runner_kernels

                replaced = runner_kernels.replace()
        receipt.leave(
            receipt.Receipt(
                pid=os.getpid(),
                state="engine",
                vllm=version(),
                model_state=type(self).__name__,
                runner_kernels=self.options.runner_kernels,
                replaced_kernels=replaced,
            )
        )


class ThorModelState(_Activated, _Default):
    """State of a target with attention layers only."""


class ThorHybridModelState(_Activated, _Hybrid):
    """State of a hybrid Gated-DeltaNet target."""
