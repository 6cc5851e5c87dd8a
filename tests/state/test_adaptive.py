"""An engine that drafts as many tokens as pay: it stops where none pass, goes on where all do, and says the same."""

from typing import Any

import pytest

from tests.state import small
from tests.state.test_engine import run
from thor_spec.vllm_plugin import seam

pytestmark = pytest.mark.skipif(seam.has_gpu_build(), reason="not run: the clock of these tests knows no graphs")
LENGTHS = (0, 3, 7)
ALL_PASS = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 7.9}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    target, drafter = small.make(tmp_path_factory.mktemp("small"), 64)
    case = {"target": str(target), "drafter": str(drafter), "drafts": 7, "adaptive": LENGTHS}
    return run({**case, "tokens": 150}, {**case, "tokens": 600, "speculation": ALL_PASS})


def test_it_stops_where_drafts_never_pass(played: list[dict[str, Any]]) -> None:
    steps = played[0]["steps"]
    assert all(steps[n] >= 16 for n in LENGTHS), steps
    assert steps[0] > 0.6 * sum(steps)
    assert sum(steps) == sum(steps[n] for n in LENGTHS)


def test_every_token_is_the_targets_own(played: list[dict[str, Any]]) -> None:
    """Or ties with it: verify steps of another width round otherwise."""
    gaps = played[0]["gaps_in_ties"]
    assert len(gaps) == 4 * 150
    assert max(gaps) <= 1
    assert len({tuple(answer) for answer in played[0]["answers"]}) == 4


def test_it_goes_on_where_they_do(played: list[dict[str, Any]]) -> None:
    steps = played[1]["steps"]
    assert steps[7] > 0.5 * sum(steps), steps
