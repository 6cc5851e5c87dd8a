"""Relaxed acceptance in vLLM's V2 runner: each request's rule, and the rejection sampler that follows it.

Between vLLM's processing of the logits and its rejection sampling, the logits of drafts that a rule takes are lifted;
afterwards they are put back. A batch without a relaxed request goes through vLLM's sampler untouched.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from thor_spec.dflash.acceptance import RULES, Acceptance
from thor_spec.errors import ConfigError
from thor_spec.kernels.relax import kernel
from thor_spec.kernels.relax.reference import COUNTED
from thor_spec.kernels.tree_walk.reference import OF_TREES
from thor_spec.vllm_plugin import compat, counters
from thor_spec.vllm_plugin.controls import Controls
from thor_spec.vllm_plugin.options import REQUEST_KEYS

_RejectionSampler: Any = compat.REJECTION_SAMPLER.resolve()


class RequestRules:
    """The rule of each request slot, on the host and on the device."""

    def __init__(self, slots: int, default: Acceptance, device: torch.device) -> None:
        self.default = default
        self.relaxed = np.zeros(slots, dtype=bool)
        self._staged = np.zeros((2, slots), dtype=np.float32)
        self._staged_kinds = np.zeros(slots, dtype=np.int32)
        self._is_stale = True
        self._numbers = torch.zeros(2, slots, dtype=torch.float32, device=device)
        self._kinds = torch.zeros(slots, dtype=torch.int32, device=device)

    def add(self, slot: int, params: Any) -> None:
        """Take the rule that a new request's sampling parameters name, or the default; greedy ones are exact."""
        extra: Mapping[str, Any] | None = params.extra_args
        given = {name: value for key, name in REQUEST_KEYS.items() if (value := (extra or {}).get(key)) is not None}
        try:
            rule = self.default.of_request(given)
        except ConfigError:  # the front door refuses these; whoever comes in by another gets exact answers
            rule = Acceptance()
        if params.temperature == 0:
            rule = Acceptance()
        self.relaxed[slot] = not rule.is_exact
        self._staged[:, slot] = rule.numbers
        self._staged_kinds[slot] = RULES.index("exact" if rule.is_exact else rule.rule)
        self._is_stale = True

    def on_device(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``eps`` and ``delta`` [slots], float32, and the rule's number [slots], int32."""
        if self._is_stale:
            # From fresh buffers, so that the next request may be staged while these copies are under way.
            self._numbers.copy_(torch.from_numpy(self._staged.copy()), non_blocking=True)
            self._kinds.copy_(torch.from_numpy(self._staged_kinds.copy()), non_blocking=True)
            self._is_stale = False
        return self._numbers[0], self._numbers[1], self._kinds


class RelaxedRejectionSampler(_RejectionSampler):
    """vLLM's rejection sampler, with drafts taken that a request's rule allows. Any batch, mixed requests."""

    def __init__(
        self, sampler: Any, *args: Any, rules: RequestRules, count: counters.Writer, controls: Controls | None
    ) -> None:
        super().__init__(sampler, *args)
        self.sampler = _Lifting(sampler, self._lift)
        self._rules = rules
        self._count = count
        self._controls = controls
        self._corrupt: Callable[[torch.Tensor], None] | None = None
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._scratch: kernel.Scratch | None = None
        self._saved = torch.empty(0)

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self._rules.relaxed[idx_mapping_np].any():
            self._pending = verify_draft_sampled, expanded_idx_mapping
        self._expect_corruption(verify_draft_sampled, cu_num_logits, idx_mapping_np)
        processed, sampled, num_sampled = super()._verify(
            logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, idx_mapping_np, expanded_idx_mapping,
            expanded_local_pos, seq_lens_upper_bound_np, verify_draft_sampled,
        )  # fmt: skip
        if self._pending is not None:
            self._pending = None
            _, _, kinds = self._rules.on_device()
            kernel.settle(
                processed, verify_draft_sampled, self._saved, cu_num_logits, idx_mapping, kinds, num_sampled,
                self._count.counts,
            )  # fmt: skip
            self._count.publish()
        return processed, sampled, num_sampled

    def _expect_corruption(self, drafts: torch.Tensor, cu_num_logits: torch.Tensor, slots: Any) -> None:
        if self._controls is not None:
            controls = self._controls
            self._corrupt = lambda found: controls.misjudge(found, drafts, cu_num_logits, slots)

    def _lift(self, processed: torch.Tensor) -> torch.Tensor:
        if self._corrupt is not None:
            self._corrupt(processed)
            self._corrupt = None
        if self._pending is None:
            return processed
        processed = processed.float()  # where there is nothing to process, these are the model's own
        drafts, slots = self._pending
        rows = len(processed)
        if self._scratch is None or len(self._saved) < rows:
            self._saved = torch.empty(rows, dtype=torch.float32, device=processed.device)
            self._scratch = kernel.Scratch.allocate(rows, processed.device)
        eps, delta, _ = self._rules.on_device()
        temperature = self.sampler.sampling_states.temperature.gpu
        kernel.lift(processed, drafts, slots, temperature, eps, delta, self._saved, scratch=self._scratch)
        return processed


class _Lifting:
    """vLLM's sampler, with a word after it has processed logits."""

    def __init__(self, sampler: Any, processed: Any) -> None:
        self._sampler = sampler
        self._processed = processed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def apply_sampling_params(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Process logits, then lift."""
        lifted: torch.Tensor = self._processed(self._sampler.apply_sampling_params(*args, **kwargs))
        return lifted


def sampler_for(
    sampler: Any,
    vllm_config: Any,
    rules: RequestRules,
    device: torch.device,
    controls: Controls | None = None,
    trees: Any = None,
) -> tuple[Any, Any] | None:
    """Return what a model state's ``custom_sampler`` returns; None leaves vLLM's own.

    With ``trees``, a ``TreeSteps``, drafts are those.

    Raises: ConfigError, if a default rule that relaxes meets another rejection method than the standard one.
    """
    speculation = vllm_config.speculative_config
    if speculation is None:
        return None
    method = speculation.rejection_sample_method
    if method != "standard" or getattr(vllm_config, "watermark_config", None) is not None:
        if not rules.default.is_exact:
            raise ConfigError(
                f"--accept {rules.default.rule} needs rejection_sample_method standard (found {method}) and no "
                "watermark. Leave one of them out."
            )
        return None
    shape = (len(RULES), len(COUNTED), speculation.num_speculative_tokens)
    count = counters.Writer.open(shape, device, counters.DRAFTS, vllm_config.parallel_config)
    given: dict[str, Any] = {"rules": rules, "count": count, "controls": controls}
    if trees is None:
        return sampler, RelaxedRejectionSampler(sampler, speculation, device, **given)
    from thor_spec.vllm_plugin.tree.sampler import TreeRejectionSampler

    given["tally"] = counters.Writer.open(
        (len(OF_TREES), trees.topology.width), device, counters.TREES, vllm_config.parallel_config
    )
    return sampler, TreeRejectionSampler(sampler, speculation, device, **given, trees=trees)
