"""Replacements for the V2 runner's Triton kernels, for machines where those are interpreted.

One module per group of upstream modules. A replacement has the name and the parameters of its kernel, so that vLLM
passes the arguments by name; it does not see the launch grid, and takes the number of programs from its arguments.
"""

import inspect
from collections.abc import Callable

from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.runner_kernels import (
    block_table,
    dflash,
    input_batch,
    logits,
    logprobs,
    mamba_align,
    rejection,
    resampling,
    sampling,
    state,
)
from thor_spec.vllm_plugin.seam import Seam

_MODULES = (input_batch, block_table, state, dflash, rejection, resampling, sampling, logits, logprobs, mamba_align)
_KERNELS = [
    (upstream, kernel) for module in _MODULES for upstream, kernels in module.REPLACES.items() for kernel in kernels
]

REPLACEMENTS: dict[str, Callable[..., None]] = {
    f"{upstream}.{kernel.__name__}": kernel for upstream, kernel in _KERNELS
}

SEAMS: tuple[Seam, ...] = tuple(
    Seam(
        target=f"{upstream}:{kernel.__name__}",
        signature=tuple(inspect.signature(kernel).parameters),
        why="run this kernel in numpy and torch where it would be interpreted",
        drop_when="vLLM brings native CPU kernels for the V2 runner",
    )
    for upstream, kernel in _KERNELS
)


def replace() -> tuple[str, ...]:
    """Register the replacements through vLLM's own override registry; return the kernels replaced.

    Raises: SeamMovedError, naming the first kernel that is not what its replacement was written for.
    """
    for seam in SEAMS:
        seam.resolve()
    compat.REGISTER_KERNELS.resolve()(REPLACEMENTS)
    return tuple(REPLACEMENTS)
