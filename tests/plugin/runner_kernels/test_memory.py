"""Every replacement leaves the memory that the interpreted kernel leaves."""

from typing import Any

import numpy as np
import pytest

from tests.plugin.runner_kernels.cases import CASES
from tests.plugin.runner_kernels.launch import INTERPRETED, OURS, Case, assert_same
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import runner_kernels
from thor_spec.vllm_plugin.seam import Seam

pytestmark = INTERPRETED

RUNS = [(kernel, build) for kernel, builds in CASES.items() for build in builds]


@pytest.mark.parametrize("seeds", [range(0, 10), range(10, 20)], ids=["first", "second"])
@pytest.mark.parametrize(("kernel", "build"), RUNS, ids=[build.__name__ for _, build in RUNS])
def test_memory_is_the_kernels(kernel: str, build: Case, seeds: range) -> None:
    for seed in seeds:
        assert_same(kernel, build, seed)


def test_every_replacement_is_compared() -> None:
    assert set(CASES) | {"_topk_topp_kernel"} == set(OURS)


@pytest.mark.parametrize(
    ("kernel", "changed", "says"),
    [
        ("_compute_slot_mappings_kernel", {"CP_SIZE": 2}, "Context parallelism"),
        ("_prepare_dflash_inputs_kernel", {"CP_SIZE": 2}, "Context parallelism"),
        ("_rejection_kernel", {"USE_BLOCK_VERIFICATION": True}, "Block verification"),
        ("_resample_kernel", {"WATERMARK": True}, "watermarking"),
    ],
)
def test_what_is_not_replaced_is_refused(kernel: str, changed: dict[str, Any], says: str) -> None:
    args = CASES[kernel][0](np.random.default_rng(0)).args
    with pytest.raises(ConfigError, match=says):
        OURS[kernel](**args | changed)


@pytest.mark.parametrize("seam", runner_kernels.SEAMS, ids=lambda seam: seam.target.split(":")[1])
def test_replacement_has_the_kernels_parameters(seam: Seam) -> None:
    assert seam.problem() is None
    assert tuple(seam.resolve().arg_names) == seam.signature  # so vLLM passes the arguments by name
