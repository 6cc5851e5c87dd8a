"""What verification kernels were measured to take, and which of them ``--gdn-kernel auto`` may choose."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One kernel of ours on a GPU."""

    kernel: Literal["replay", "wy"]
    record: str
    """The folder in ``evidence/`` of its times."""
    of_vllms_time: tuple[float, ...]
    """Verification and commit of a chain of 16 against vLLM's kernel, at batch 1, 8 and 64."""
    lossless: str | None
    """The folder in ``evidence/`` of a green lossless gate on a GPU; None: nobody has run it."""


MEASURED = (
    # The gate in this record: outputs and states have vLLM's bits.
    Measured(
        kernel="replay",
        record="20261130T151201-kernels",
        of_vllms_time=(0.613, 0.665, 0.784),
        lossless="20261130T151201-kernels",
    ),
    # It rounds in an order of its own, so it needs `thor-spec verify lossless` in an engine.
    Measured(
        kernel="wy",
        record="20261130T151201-kernels",
        of_vllms_time=(0.306, 0.262, 0.244),
        lossless="20261130T151106-verify-lossless",
    ),
)


def fastest(measured: Sequence[Measured] = MEASURED) -> Literal["replay", "wy"]:
    """Return the kernel that is fastest at its slowest, of those that a lossless gate was green for."""
    return min((each for each in measured if each.lossless), key=lambda each: max(each.of_vllms_time)).kernel
