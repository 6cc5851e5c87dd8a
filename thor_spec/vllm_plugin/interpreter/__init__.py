"""Run vLLM's Triton kernels without a GPU, under Triton's interpreter.

A CPU build of vLLM takes its Triton path only where Triton knows a backend named ``cpu``. Triton finds backends
through the entry points of installed distributions, in every process that imports it; ``path/`` holds a distribution
of nothing but that entry point. So a process, and all that it starts, gets the backend by having ``path/`` on
``PYTHONPATH``, and an installed thor-spec changes nothing for anybody else.
"""

from pathlib import Path

PATH = Path(__file__).parent / "path"


def environment(python_path: str = "") -> dict[str, str]:
    """Return the variables that make a process and its children interpret Triton kernels.

    Args:
        python_path: the ``PYTHONPATH`` to extend.
    """
    joined = f"{PATH}:{python_path}" if python_path else str(PATH)
    # The entry point is looked up only if Triton does not restrict itself to the backends it ships.
    return {"TRITON_INTERPRET": "1", "TRITON_BACKENDS_IN_TREE": "0", "PYTHONPATH": joined}
