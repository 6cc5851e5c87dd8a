"""Between a scheduler and the choice of how many tokens to draft; ``tests/state/test_adaptive.py`` sees engines."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thor_spec.dflash.length import TRIED, Lengths
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import drafting
from thor_spec.vllm_plugin.drafting import Drafting
from thor_spec.vllm_plugin.options import PluginOptions

CONFIG = SimpleNamespace(
    additional_config={"thor_spec": {"adaptive_drafts": True}},
    speculative_config=SimpleNamespace(
        num_speculative_tokens=7, num_speculative_tokens_per_batch_size=[(1, 1, 0), (2, 4, 9)]
    ),
    parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
    scheduler_config=SimpleNamespace(max_num_seqs=4),
)


class Scheduler:
    """As much of vLLM's as is touched: runs one request, whose drafts pass as far as ``passes``."""

    def __init__(self, config: Any = CONFIG, passes: int = 0) -> None:
        self.vllm_config = config
        self.dynamic_sd_lookup: Any = None
        self.running = [SimpleNamespace(num_computed_tokens=100)]
        self.passes = passes
        self.prompt = 0
        self.drafted = 0

    def schedule(self, throttle_prefills: bool = False) -> Any:
        assert not throttle_prefills
        width, self.drafted = self.drafted, self.dynamic_sd_lookup[len(self.running)] if self.dynamic_sd_lookup else 7
        return SimpleNamespace(
            scheduled_new_reqs=[],
            num_scheduled_tokens={"a": 1 + width, **({"b": self.prompt} if self.prompt else {})},
            scheduled_spec_decode_tokens={"a": [-1] * width} if width else {},
            num_spec_tokens_to_schedule=self.drafted,
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        del scheduler_output, model_runner_output
        return "outputs"

    def step(self, clock: Any) -> int:
        output = drafting.chosen(Scheduler.schedule)(self)
        width = len(output.scheduled_spec_decode_tokens.get("a", ()))
        clock.now += 1 + width / 10
        told = SimpleNamespace(sampled_token_ids=[[0] * (1 + min(width, self.passes))])
        assert drafting.observed(Scheduler.update_from_output)(self, output, told) == "outputs"
        return int(output.num_spec_tokens_to_schedule)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(now=0.0)
    found.monotonic = lambda: found.now
    monkeypatch.setattr(drafting, "time", found)
    return found


@pytest.mark.parametrize(("passes", "best"), [(0, 0), (7, 7)])
def test_a_scheduler_drafts_what_pays(clock: Any, passes: int, best: int) -> None:
    scheduler = Scheduler(passes=passes)
    drawn = [scheduler.step(clock) for _ in range(200)]
    assert drawn[-100:] == [best] * 100
    assert {0, 7} == set(drawn)


def test_only_steps_that_verify_what_they_draft_are_judged(clock: Any, tmp_path: Path) -> None:
    scheduler = Scheduler(passes=7)
    scheduler.thor_spec_drafting = known = Drafting(Lengths((0, 7)), 4, tmp_path / "1.lengths.npy")  # type: ignore[attr-defined]
    for _ in range(TRIED + 2):
        scheduler.step(clock)
    # The first verified nothing, and the last drafts nothing but verifies: neither says what a length brings.
    rows = {(name, length): (depth, figure) for name, length, depth, figure in drafting.counted(tmp_path)}
    assert rows["steps", 7] == (0, TRIED)
    assert rows["tokens", 7] == (0, 8 * TRIED)
    assert rows["seconds", 7][1] == pytest.approx(1.7 * TRIED)
    assert ("steps", 0) not in rows
    scheduler.prompt = 50  # of somebody else, beside it
    before = known._table.copy()
    for _ in range(5):
        scheduler.step(clock)
    assert (known._table == before).all()


def test_without_the_option_nothing_is_touched() -> None:
    scheduler = Scheduler(SimpleNamespace(**{**vars(CONFIG), "additional_config": {}}))
    output = drafting.chosen(Scheduler.schedule)(scheduler)
    assert scheduler.dynamic_sd_lookup is None
    assert drafting.observed(Scheduler.update_from_output)(scheduler, output, None) == "outputs"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"speculative_config": None}, "without a drafter"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2, data_parallel_size=1)}, "pipeline parallelism"),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=2)}, "data parallelism"),
        (
            {
                "speculative_config": SimpleNamespace(
                    num_speculative_tokens=7, num_speculative_tokens_per_batch_size=None
                )
            },
            "num_speculative_tokens_per_batch_size",
        ),
    ],
)
def test_what_it_does_not_go_with(change: dict[str, Any], says: str) -> None:
    assert drafting.lengths_of(CONFIG) == (0, 7)
    with pytest.raises(ConfigError, match=says):
        drafting.lengths_of(SimpleNamespace(**{**vars(CONFIG), **change}))


def test_not_with_trees() -> None:
    with pytest.raises(ConfigError, match="Leave one out"):
        PluginOptions(adaptive_drafts=True, tree="16")
