"""Our per-request model state in vLLM's V2 runner: the place from which every runner hook is reached."""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from thor_spec.vllm_plugin import compat, cpu_drafter, cpu_verify, drafting, receipt, rope
from thor_spec.vllm_plugin.one_state import choice
from thor_spec.vllm_plugin.options import PluginOptions
from thor_spec.vllm_plugin.seam import has_gpu_build, version
from thor_spec.vllm_plugin.tree import choice as tree_choice

if TYPE_CHECKING:
    import torch

    from thor_spec.vllm_plugin.acceptance import RequestRules
    from thor_spec.vllm_plugin.cached_controls import CachedControls
    from thor_spec.vllm_plugin.controls import Controls
    from thor_spec.vllm_plugin.tree.steps import TreeSteps

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
            self._cached_controls: CachedControls | None = None
            self.trees: TreeSteps | None = None
            if self.options.controls and vllm_config.cache_config.enable_prefix_caching:
                from thor_spec.vllm_plugin import cached_controls

                self._cached_controls = cached_controls.CachedControls(vllm_config)
            elif self.options.controls:
                from thor_spec.vllm_plugin import controls

                self._controls = controls.Controls(vllm_config)
            if not has_gpu_build():
                cpu_drafter.install()
                cpu_verify.install()
            replaced: tuple[str, ...] = ()
            if self.options.runner_kernels == "torch":
                from thor_spec.vllm_plugin import runner_kernels

                replaced = runner_kernels.replace()
            drafting.lengths_of(vllm_config)  # refuses what the scheduler could not do
            effective = rope.effective(vllm_config)
            if (shape := tree_choice.shape(vllm_config)) is not None:
                from thor_spec.vllm_plugin.tree import steps

                self.trees = steps.TreeSteps(vllm_config, args[0], shape, self.max_num_reqs, self.device)  # type: ignore[attr-defined]
        self._receipt = receipt.Receipt(
            pid=os.getpid(),
            state="engine",
            vllm=version(),
            model_state=type(self).__name__,
            runner_kernels=self.options.runner_kernels,
            replaced_kernels=replaced,
            rope=effective,
        )
        receipt.leave(self._receipt)

    @property
    def topology(self) -> Any:
        """The trees of requests; None where chains are drafted."""
        return self.trees.topology if self.trees is not None else None

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        """Put the rejection sampler that knows relaxed rules in the place of vLLM's."""
        with receipt.of_failure():
            from thor_spec.vllm_plugin import acceptance

            mine: Any = self
            rules = acceptance.RequestRules(mine.max_num_reqs, self.options.acceptance, mine.device)
            found = acceptance.sampler_for(sampler, mine.vllm_config, rules, mine.device, self._controls, self.trees)
            self._rules = rules if found else None
            return found

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Learn the request's rule."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        if self._rules is not None and new_req_data.sampling_params is not None:
            self._rules.add(req_index, new_req_data.sampling_params)
        if self._controls is not None and new_req_data.sampling_params is not None:
            self._controls.add(req_index, new_req_data.sampling_params.extra_args)
        if self._cached_controls is not None and new_req_data.sampling_params is not None:
            extra = new_req_data.sampling_params.extra_args
            self._cached_controls.add(req_index, extra, new_req_data.num_computed_tokens)
        if self.trees is not None and new_req_data.sampling_params is not None:
            self.trees.add(req_index, new_req_data.sampling_params)

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        """Learn where the caches lie."""
        super().initialize_kv_cache(kv_cache_config, block_tables)  # type: ignore[misc]
        if self.trees is not None:
            with receipt.of_failure():
                self.trees.bind(kv_cache_config)

    def preprocess_state(self, input_batch: Any, block_tables: Any, kv_cache_config: Any, *args: Any) -> None:
        """Corrupt what a request asked for; nothing, unless the server allows it."""
        if self._cached_controls is not None:
            self._cached_controls.before_step(input_batch.idx_mapping_np, block_tables, kv_cache_config)
        super().preprocess_state(input_batch, block_tables, kv_cache_config, *args)  # type: ignore[misc]
        if self._controls is not None:
            accepted = getattr(self, "num_accepted_tokens_gpu", None)
            self._controls.before_forward(input_batch, block_tables, kv_cache_config.kv_cache_groups, accepted)

    def prepare_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Lay out the step's trees; and as above."""
        if self.trees is not None:
            self.trees.prepare(input_batch, args[1], args[2], for_capture=kwargs.get("for_capture", False))
        if self._controls is not None and not kwargs.get("for_capture"):
            self._controls.swap_cache_rows(input_batch, args[2])
        return super().prepare_attn(input_batch, *args, **kwargs)  # type: ignore[misc]

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
        """Give a tree's nodes the positions of their depth; and as above."""
        inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)  # type: ignore[misc]
        if self.trees is not None:
            inputs = self.trees.positions(input_batch, inputs)
        if self._controls is not None:
            self._controls.shift_positions(input_batch, inputs.get("positions", input_batch.positions))
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """Show captured graphs the buffers that ``prepare_inputs`` writes."""
        inputs: dict[str, Any] = super().prepare_dummy_inputs(num_reqs, num_tokens)  # type: ignore[misc]
        return inputs if self.trees is None else self.trees.dummy_positions(num_tokens, inputs)

    def postprocess_state(
        self,
        idx_mapping: "torch.Tensor",
        num_sampled: "torch.Tensor | int",
        num_computed_tokens: "torch.Tensor | None" = None,
    ) -> None:
        """Bring the cache into the order of the accepted path."""
        if self.trees is not None:
            self.trees.clock.mark("commit", again=False)
            self.trees.commit(len(idx_mapping))
        super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)  # type: ignore[misc]
        if self.trees is not None:
            self.trees.clock.mark("committed")


class ThorModelState(_Activated, _Default):
    """State of a target with attention layers only."""


class ThorHybridModelState(_Activated, _Hybrid):
    """State of a hybrid Gated-DeltaNet target, with one recurrent state per sequence where that is chosen."""

    def __init__(self, vllm_config: Any, model: Any, *args: Any) -> None:
        super().__init__(vllm_config, model, *args)
        self.steps: Any = None
        with receipt.of_failure():
            if choice.reconstructs(vllm_config):
                from thor_spec.vllm_plugin.one_state.steps import Steps

                self.steps = Steps(vllm_config, model, self.max_num_reqs)

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        """Learn where states and block tables lie."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        if self.steps is not None:
            with receipt.of_failure():
                self.steps.bind(kv_cache_config, block_tables)
        described = self.steps.described if self.steps is not None else choice.described(self.vllm_config)
        receipt.leave(dataclasses.replace(self._receipt, recurrent_state=described))

    def prepare_attn(self, input_batch: Any, *args: Any, for_capture: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Note which rows the coming forward pass verifies."""
        if self.steps is not None and not for_capture:
            self.steps.verify_padded_prompts(input_batch)
        metadata: dict[str, Any] = super().prepare_attn(input_batch, *args, for_capture=for_capture, **kwargs)
        if self.steps is not None:
            self.steps.prepared(input_batch, metadata, for_capture=for_capture)
        return metadata

    def postprocess_state(
        self,
        idx_mapping: "torch.Tensor",
        num_sampled: "torch.Tensor | int",
        num_computed_tokens: "torch.Tensor | None" = None,
    ) -> None:
        """Commit the step. For vLLM every row has then accepted one token: its state is the one in its slot."""
        if self.trees is not None:
            self.trees.clock.mark("commit")
        if self.steps is not None and num_computed_tokens is not None:
            computed = num_computed_tokens
            if self._controls is not None:
                computed = self._controls.miscounted(idx_mapping, computed, num_sampled)
            self.steps.commit(idx_mapping, computed, None if self.trees is None else self.trees.path(len(idx_mapping)))
            num_sampled = 1
        super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)
        if self._controls is not None and self.steps is None:
            self._controls.miscount(idx_mapping, self.num_accepted_tokens_gpu)
