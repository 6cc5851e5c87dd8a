"""Our per-request model state in vLLM's V2 runner: the place from which every runner hook is reached."""

import os
from typing import TYPE_CHECKING, Any

from thor_spec.vllm_plugin import compat, cpu_verify, receipt
from thor_spec.vllm_plugin.options import PluginOptions
from thor_spec.vllm_plugin.seam import has_gpu_build, version

if TYPE_CHECKING:
    from thor_spec.vllm_plugin.acceptance import RequestRules
    from thor_spec.vllm_plugin.controls import Controls

_Default: Any = compat.DEFAULT_MODEL_STATE.resolve()
_Hybrid: Any = compat.HYBRID_MODEL_STATE.resolve()


class _Activated:
    """Reads the plugin's options, applies them, and leaves the engine's receipt."""

    def __init__(self, vllm_config: Any, *args: Any) -> None:
        with receipt.of_failure():
            self.options = PluginOptions.parse(vllm_config.additional_config)
            super().__init__(vllm_config, *args)  # type: ignore[call-arg]  # stands before vLLM's class in every use
            self._rules: RequestRules | None = None
            self._controls: Controls | None = None
            if self.options.controls:
                from thor_spec.vllm_plugin import controls

                self._controls = controls.for_engine(vllm_config)
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

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        """Put the rejection sampler that knows relaxed rules in the place of vLLM's."""
        with receipt.of_failure():
            from thor_spec.vllm_plugin import acceptance

            device: Any = self.device  # type: ignore[attr-defined]
            rules = acceptance.RequestRules(self.max_num_reqs, self.options.acceptance, device)  # type: ignore[attr-defined]
            found = acceptance.sampler_for(sampler, self.vllm_config, rules, device, self._controls)  # type: ignore[attr-defined]
            self._rules = rules if found else None
            return found

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Learn the request's rule."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        if self._rules is not None and new_req_data.sampling_params is not None:
            self._rules.add(req_index, new_req_data.sampling_params)
        if self._controls is not None and new_req_data.sampling_params is not None:
            self._controls.add(req_index, new_req_data.sampling_params.extra_args)

    def preprocess_state(self, input_batch: Any, block_tables: Any, kv_cache_config: Any, *args: Any) -> None:
        """Corrupt what a request asked for; nothing, unless the server allows it."""
        super().preprocess_state(input_batch, block_tables, kv_cache_config, *args)  # type: ignore[misc]
        if self._controls is not None:
            accepted = getattr(self, "num_accepted_tokens_gpu", None)
            self._controls.before_forward(input_batch, block_tables, kv_cache_config.kv_cache_groups, accepted)

    def prepare_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """As above."""
        if self._controls is not None and not kwargs.get("for_capture"):
            self._controls.swap_cache_rows(input_batch, args[2])
        return super().prepare_attn(input_batch, *args, **kwargs)  # type: ignore[misc]

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
        """As above."""
        inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)  # type: ignore[misc]
        if self._controls is not None:
            self._controls.shift_positions(input_batch, inputs.get("positions", input_batch.positions))
        return inputs

    def postprocess_state(self, idx_mapping: Any, *args: Any) -> None:
        """As above."""
        super().postprocess_state(idx_mapping, *args)  # type: ignore[misc]
        if self._controls is not None and hasattr(self, "num_accepted_tokens_gpu"):
            self._controls.miscount(idx_mapping, self.num_accepted_tokens_gpu)


class ThorModelState(_Activated, _Default):
    """State of a target with attention layers only."""


class ThorHybridModelState(_Activated, _Hybrid):
    """State of a hybrid Gated-DeltaNet target."""
