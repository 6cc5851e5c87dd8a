"""The mends of vLLM's scheduler, each around a stand-in; ``tests/state`` and ``tests/e2e`` see them in engines."""

from types import SimpleNamespace
from typing import Any

import pytest

from thor_spec.vllm_plugin import compat, scheduling, seam


def test_prompts_are_cut_at_the_blocks_that_the_cache_has() -> None:
    """Where workers are processes, the scheduler's configuration was not fitted to the recurrent state."""
    scheduler = SimpleNamespace(cache_config=SimpleNamespace(block_size=128), block_size=256)
    split = scheduling.at_blocks(
        lambda self, tokens: tokens // self.cache_config.block_size * self.cache_config.block_size
    )
    assert split(scheduler, 707) == 512
    assert scheduler.cache_config.block_size == 128


@pytest.mark.parametrize(
    ("mamba", "retention", "entered"), [(True, 0, 100), (True, None, 130), (False, 0, 130), (True, 256, 130)]
)
def test_a_hybrids_answers_stay_out_where_their_states_do(mamba: bool, retention: int | None, entered: int) -> None:
    seen: list[int] = []
    config = SimpleNamespace(has_mamba_layers=mamba)
    coordinator = SimpleNamespace(kv_cache_config=config, retention_interval=retention)
    enter = scheduling.prompts_only(lambda _self, _request, count: seen.append(count))
    request = SimpleNamespace(num_prompt_tokens=100)
    enter(coordinator, request, 130)
    enter(coordinator, request, 90)
    assert seen == [entered, 90]


@pytest.mark.parametrize(("method", "drops"), [("dflash", False), ("mtp", True), ("eagle3", True)])
def test_only_eagle_drops_a_block(method: str, drops: bool) -> None:
    assert scheduling.without_drop(lambda _: True)(SimpleNamespace(method=method)) is drops


def test_they_are_installed_once_and_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(seam.Seam, "wrap", lambda place, _: taken.append(place))
    scheduling.install("0.33.0")
    assert compat.BLOCK_DROP not in taken
    assert {compat.ALIGNED_SPLIT, compat.ENTER_BLOCKS, compat.RECORD_LOOKUP} <= set(taken)
    monkeypatch.undo()
    if not seam.has_gpu_build():
        for _ in range(2):
            scheduling.install(seam.version())
        assert not hasattr(compat.ALIGNED_SPLIT.resolve().__wrapped__, "__wrapped__")
