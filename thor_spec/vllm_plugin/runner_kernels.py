"""Torch replacements for the V2 runner's Triton kernels, for machines where those are interpreted."""

from thor_spec.vllm_plugin import compat


def replace() -> tuple[str, ...]:
    """Register the replacements through vLLM's own override registry; return the kernels replaced."""
    overrides: dict[str, object] = {}
    compat.REGISTER_KERNELS.resolve()(overrides)
    return tuple(overrides)
