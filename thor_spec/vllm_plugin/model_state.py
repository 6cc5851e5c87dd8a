"""Our per-request model state in vLLM's V2 runner: the place from which every runner hook is reached."""

import os
from typing import TYPE_CHECKING, Any

from thor_spec.vllm_plugin import compat, cpu_verify, receipt, rope
from thor_spec.vllm_plugin.options import PluginOptions
from thor_spec.vllm_plugin.seam import has_gpu_build, version

if TYPE_CHECKING:
    from thor_spec.vllm_plugin.acceptance import RequestRules

_Default: Any = compat.DEFAULT_MODEL_STATE.resolve()
_Hybrid: Any = compat.HYBRID_MODEL_STATE.resolve()


class _Activated:
    """Reads the plugin's options, applies them, and leaves the engine's receipt."""

    def __init__(self, vllm_config: Any, *args: Any) -> None:
        with receipt.of_failure():
            self.options = PluginOptions.parse(vllm_config.additional_config)
            super().__init__(vllm_config, *args)  # type: ignore[call-arg]  # stands before vLLM's class in every use
            self._rules: RequestRules | None = None
            if not has_gpu_build():
                cpu_verify.install()
            replaced: tuple[str, ...] = ()
            if self.options.runner_kernels == "torch":
                from thor_spec.vllm_plugin import runner_kernels

                replaced = runner_kernels.replace()
            effective = rope.effective(vllm_config)
        receipt.leave(
            receipt.Receipt(
                pid=os.getpid(),
                state="engine",
                vllm=version(),
                model_state=type(self).__name__,
                runner_kernels=self.options.runner_kernels,
                replaced_kernels=replaced,
                rope=effective,
            )
        )

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        """Put the rejection sampler that knows relaxed rules in the place of vLLM's."""
        with receipt.of_failure():
            from thor_spec.vllm_plugin import acceptance

            device: Any = self.device  # type: ignore[attr-defined]
            rules = acceptance.RequestRules(self.max_num_reqs, self.options.acceptance, device)  # type: ignore[attr-defined]
            found = acceptance.sampler_for(sampler, self.vllm_config, rules, device)  # type: ignore[attr-defined]
            self._rules = rules if found else None
            return found

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Learn the request's rule."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        if self._rules is not None and new_req_data.sampling_params is not None:
            self._rules.add(req_index, new_req_data.sampling_params)


class ThorModelState(_Activated, _Default):
    """State of a target with attention layers only."""


class ThorHybridModelState(_Activated, _Hybrid):
    """State of a hybrid Gated-DeltaNet target."""
