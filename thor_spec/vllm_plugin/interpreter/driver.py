"""The driver half of the ``cpu`` backend: a device that is always there, and whose clock is the host's."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from thor_spec import env


class InterpreterDriver(DriverBase):
    """Active where kernels are interpreted, so that a machine with a GPU never sees two drivers."""

    @classmethod
    def is_active(cls) -> bool:
        """Return whether this process interprets kernels."""
        return env.triton_interprets()

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return ``ty``: no C++ is generated."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """Return the target that only this backend supports."""
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> Any:
        """Return the torch device that tensors live on."""
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        """Return the index of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        """Return the only stream."""
        return 0

    def get_benchmarker(self) -> Callable[..., Sequence[float]]:
        """Return a benchmark function for the autotuner: one call, in milliseconds, for every quantile."""

        def once(kernel: Callable[[], Any], *, quantiles: Sequence[float] = (0.5,), **_: Any) -> Sequence[float]:
            start = time.perf_counter()
            kernel()
            elapsed_ms = (time.perf_counter() - start) * 1e3
            return [elapsed_ms] * len(quantiles)

        return once
