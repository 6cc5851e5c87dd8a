"""What the scheduler is mended for: each mend is left out in turn, and what it is for comes back."""

from typing import Any

import pytest

from tests.state import small
from tests.state.test_engine import run
from thor_spec.vllm_plugin import seam

pytestmark = pytest.mark.skipif(
    seam.has_gpu_build(), reason="vLLM 0.33 has one of the faults only; the gate looks there"
)
WITHOUT = ("", "ENTER_BLOCKS", "BLOCK_DROP", "ALIGNED_SPLIT")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    target, drafter = small.make(tmp_path_factory.mktemp("small"), 64)
    case = {"target": str(target), "drafter": str(drafter), "drafts": 5}
    return dict(zip(WITHOUT, run(*({**case, "without": name} for name in WITHOUT)), strict=True))


def test_the_cache_changes_no_bit_and_loses_no_hit(played: dict[str, Any]) -> None:
    *requests, reasons = played[""]
    assert all(request["same"] for request in requests)
    assert all(request["reused"] >= request["least"] for request in requests)
    assert requests[2]["least"] == requests[2]["block"]
    assert requests[4]["least"] == 2 * requests[4]["block"]
    assert reasons["hit"] >= 2


def test_without_the_first_mend_an_answers_blocks_are_reused(played: dict[str, Any]) -> None:
    """The second branch goes on from an attention block whose last token a verify step wrote."""
    assert [request["same"] for request in played["ENTER_BLOCKS"][:5]] == [True, True, False, True, True]


def test_without_the_second_a_repeat_finds_nothing(played: dict[str, Any]) -> None:
    repeat = played["BLOCK_DROP"][4]
    assert repeat["reused"] < repeat["least"]


def test_without_the_third_prompts_are_cut_where_nothing_can_go_on(played: dict[str, Any]) -> None:
    """The scheduler's configuration names blocks that the cache does not have."""
    requests = played["ALIGNED_SPLIT"][:5]
    assert any(request["reused"] < request["least"] for request in requests)
