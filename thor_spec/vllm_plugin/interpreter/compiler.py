"""The compiler half of the ``cpu`` backend: there is nothing to compile under the interpreter."""

from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget

from thor_spec.errors import PlatformError


class InterpreterBackend(BaseBackend):
    """Refuses to compile; a kernel that gets here was not decorated under ``TRITON_INTERPRET=1``."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Return whether ``target`` is this backend's."""
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        """Return the cache key of this backend."""
        return "interpreter"

    def parse_options(self, options: dict[str, Any]) -> object:  # noqa: ARG002
        """Refuse: only a compilation parses options."""
        raise PlatformError(
            "A Triton kernel was to be compiled for the CPU, where it can only be interpreted. "
            "Set TRITON_INTERPRET=1 before the first import of Triton; `thor-spec serve` does."
        )

    def add_stages(self, stages: dict[str, Any], options: object) -> None:
        """Add nothing."""

    def load_dialects(self, context: Any) -> None:
        """Load nothing."""

    def get_module_map(self) -> dict[str, Any]:
        """Map nothing."""
        return {}
