"""Memory: what is available, what CUDA sees of it, and what would help."""

from collections.abc import Iterator

from thor_spec.device.machine import Machine
from thor_spec.doctor.report import Check, Level

_GIB = 1 << 30
_DROP = "`sync; echo 3 | sudo tee /proc/sys/vm/drop_caches`"
_CACHE_WORTH_DROPPING = 8 * _GIB


def check(machine: Machine) -> Iterator[Check]:
    """Yield what is available, and on unified memory what the page cache hides."""
    memory = machine.memory
    if memory.available is None or memory.total is None:
        yield Check(name="memory", level=Level.WARN, detail="/proc/meminfo cannot be read here")
        return
    scarce = memory.available < 4 * _GIB
    yield Check(
        name="memory",
        level=Level.WARN if scarce else Level.OK,
        detail=f"{memory.available / _GIB:.1f} GiB of {memory.total / _GIB:.1f} GiB available",
        remedy="Close other programs: an engine needs more than 4 GiB." if scarce else "",
    )
    if not machine.board.is_unified or memory.free is None or memory.reclaimable is None:
        return
    hidden = memory.reclaimable > _CACHE_WORTH_DROPPING
    yield Check(
        name="page cache",
        level=Level.WARN if hidden else Level.OK,
        detail=f"CUDA sees {memory.free / _GIB:.1f} GiB free; the page cache hides {memory.reclaimable / _GIB:.1f} GiB",
        remedy=f"vLLM's check at the start counts free memory only (vllm#48140): {_DROP}." if hidden else "",
    )
