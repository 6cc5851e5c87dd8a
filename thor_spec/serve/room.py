"""Whether the KV cache that was asked for can be had at all: seen before anything starts."""

from pathlib import Path

from thor_spec.device import board, cuda
from thor_spec.errors import CapacityError
from thor_spec.guard.memory import GIB, ProcMemory, default_floor_bytes


def require_cache(asked: int | None, memory: ProcMemory, floor: int | None, *, gpu: bool) -> None:
    """Raise CapacityError, where a cache of ``asked`` bytes is more than what is free, weights not counted.

    Args:
        floor: bytes that must stay available; None takes the guard's own.
        gpu: whether the engine runs on one; beside memory of its own that of the machine does not count.
    """
    if asked is None:
        return
    # Asking the device takes a process of its own; what shares its memory by what it is need not be asked.
    device = cuda.probe() if gpu and not board.detect(Path("/"), None).is_unified else None
    if device is not None and not device.integrated and not board.detect(Path("/"), device).is_unified:
        room, where = device.total_bytes, f"{device.name} has {device.total_bytes / GIB:.2f} GiB of memory in all"
    else:
        here = memory.read()
        floor = default_floor_bytes(here.total_bytes) if floor is None else floor
        room = here.available_bytes - floor
        where = f"{here.available_bytes / GIB:.2f} GiB of memory are free, of which {floor / GIB:.2f} GiB must stay so"
    if asked > room:
        raise CapacityError(
            f"--kv-cache-memory {asked / GIB:.2f} GiB is more than there is: {where}. The engine would die while it "
            "starts. Lower it; `thor-spec plan` says what fits beside the weights."
        )
