"""What a launch is given, and the comparison of what it leaves with what the replacement leaves.

A case builds the arguments of one launch from a seed, with every output filled with nonsense. It is built twice: the
kernel runs on one copy, its replacement on the other, and all tensors must then agree, bit for bit unless the case
says which sums may be added in another order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from thor_spec import env
from thor_spec.vllm_plugin import runner_kernels

INTERPRETED = pytest.mark.skipif(not env.triton_interprets(), reason="not run: kernels are compiled here")
SEAMS = {seam.target.split(":")[1]: seam for seam in runner_kernels.SEAMS}
OURS = {name.rpartition(".")[2]: kernel for name, kernel in runner_kernels.REPLACEMENTS.items()}


@dataclass
class Launch:
    grid: tuple[int, ...]
    args: dict[str, Any]
    behind: Sequence[torch.Tensor] = ()
    """Tensors that are passed by address."""
    close: Sequence[str] = ()
    """Sums of float32, which the kernel adds over a padded block and so in another order: equal to 1e-6."""


Case = Callable[[np.random.Generator], Launch]
CASES: dict[str, tuple[Case, ...]] = {}


def case(kernel: str) -> Callable[[Case], Case]:
    def register(build: Case) -> Case:
        CASES[kernel] = (*CASES.get(kernel, ()), build)
        return build

    return register


def run(kernel: str, build: Case, seed: int, launch: Callable[..., Any], *, ours: bool) -> Launch:
    made = build(np.random.default_rng(seed))
    if ours:
        launch(**made.args)
    else:
        launch[made.grid](*made.args.values())  # type: ignore[index]
    return made


def assert_same(kernel: str, build: Case, seed: int) -> Launch:
    want = run(kernel, build, seed, SEAMS[kernel].resolve(), ours=False)
    got = run(kernel, build, seed, OURS[kernel], ours=True)
    tensors = [(name, a, got.args[name]) for name, a in want.args.items() if isinstance(a, torch.Tensor)]
    tensors += [(f"memory {i}", a, b) for i, (a, b) in enumerate(zip(want.behind, got.behind, strict=True))]
    for name, a, b in tensors:
        if a.dtype == torch.uint64 or name in ("block_table_ptrs_ptr", "state_base_addrs_ptr"):
            continue  # addresses
        budget = 1e-6 if name in want.close else 0.0
        torch.testing.assert_close(b, a, rtol=budget, atol=budget, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")
    return want
