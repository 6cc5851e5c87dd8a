"""Planted corruption hits what it names, in the requests that asked for it, and nothing else."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from thor_spec.config import CONTROLS
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin.controls import Controls, for_engine
from thor_spec.vllm_plugin.options import CONTROL_KEY

ASKS, IS_HONEST = 5, 2  # request slots


def made(kind: str) -> tuple[Controls, Any, tuple[torch.Tensor, torch.Tensor]]:
    """Controls with one request of a kind and an honest one, their batch, and a recurrent layer's cache."""
    g = torch.Generator().manual_seed(1)
    cache = (torch.randn(8, 6, 4, generator=g), torch.randn(8, 2, 3, 3, generator=g))
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"gdn": SimpleNamespace(kv_cache=cache)}),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
    )
    controls = for_engine(config)
    controls.add(ASKS, {CONTROL_KEY: kind})
    controls.add(IS_HONEST, None)
    batch = SimpleNamespace(
        idx_mapping_np=np.array([IS_HONEST, ASKS]),
        is_prefilling_np=np.array([False, False]),
        num_draft_tokens_per_req=np.array([3, 3]),
        query_start_loc_np=np.array([0, 4, 8]),
    )
    return controls, batch, cache


GROUPS = [SimpleNamespace(layer_names=["gdn"], kv_cache_spec=SimpleNamespace(mamba_type="gdn"))]
TABLES = (torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]]),)


def changed_rows(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    return [i for i in range(len(before)) if not torch.equal(before[i], after[i])]


def test_the_state_that_the_next_step_starts_from() -> None:
    controls, batch, (window, state) = made("state-slot")
    was = window.clone(), state.clone()
    accepted = torch.ones(8, dtype=torch.int32)
    accepted[ASKS] = 3
    controls.before_forward(batch, TABLES, GROUPS, accepted)
    assert changed_rows(was[1], state) == [6]
    assert torch.equal(state[6], -was[1][6])
    assert torch.equal(window, was[0])


def test_the_window_of_the_step_before() -> None:
    controls, batch, (window, _) = made("conv-window")
    first = window.clone()
    controls.before_forward(batch, TABLES, GROUPS, None)
    assert torch.equal(window, first)
    window[4] += 1
    controls.before_forward(batch, TABLES, GROUPS, None)
    assert torch.equal(window, first)
    controls.add(ASKS, {CONTROL_KEY: "conv-window"})  # another request must not get this one's window
    window[4] += 2
    before = window.clone()
    controls.before_forward(batch, TABLES, GROUPS, None)
    assert torch.equal(window, before)


def test_cache_rows_of_a_verified_row() -> None:
    controls, batch, _ = made("kv-rows")
    slots = torch.arange(16).view(2, 8)
    controls.swap_cache_rows(batch, slots)
    assert slots[0].tolist() == [0, 1, 2, 3, 5, 4, 6, 7]
    batch.num_draft_tokens_per_req = None
    controls.swap_cache_rows(batch, slots)
    assert slots[0].tolist() == [0, 1, 2, 3, 5, 4, 6, 7]


@pytest.mark.parametrize("shape", [(8,), (3, 8)])
def test_positions_drift(shape: tuple[int, ...]) -> None:
    controls, batch, _ = made("position")
    for steps in (1, 2):
        positions = torch.zeros(shape, dtype=torch.int64)
        controls.shift_positions(batch, positions)
        assert positions.reshape(-1, 8)[-1].tolist() == [0] * 4 + [steps] * 4


def test_accepted_lengths() -> None:
    controls, *_ = made("accepted-length")
    accepted = torch.tensor([1, 1, 4, 1, 1, 3])
    controls.miscount(torch.tensor([IS_HONEST, ASKS]), accepted)
    assert accepted.tolist() == [1, 1, 4, 1, 1, 2]
    accepted[ASKS] = 1
    controls.miscount(torch.tensor([IS_HONEST, ASKS]), accepted)
    assert accepted[ASKS] == 2


def test_tokens_that_hold_where_states_are_reconstructed() -> None:
    controls, *_ = made("accepted-length")
    computed = torch.tensor([9, 9, 9, 9, 9, 9])
    for sampled, held in ((3, 8), (1, 10)):
        slots = torch.tensor([IS_HONEST, ASKS])
        changed = controls.miscounted(slots, computed, torch.tensor([2, sampled]))
        assert (int(changed[ASKS]), int(changed[IS_HONEST])) == (held, 9)
    assert computed.tolist() == [9] * 6


@pytest.mark.parametrize("kind", ["blind-draft", "bonus-token", "sharpened"])
def test_verdicts(kind: str) -> None:
    controls, batch, _ = made(kind)
    logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(2))
    drafts = torch.tensor([0, 1, 2, 3, 4, 5, -1, 6])
    was = logits.clone()
    controls.misjudge(logits, drafts, torch.tensor([0, 4, 8]), batch.idx_mapping_np)
    assert torch.equal(logits[:4], was[:4])
    if kind == "blind-draft":
        assert changed_rows(was, logits) == [4, 6]
        assert logits[4].argmax() == 5
        assert logits[6].argmax() == 6
    elif kind == "bonus-token":
        assert changed_rows(was, logits) == [7]
        assert logits[7].argmax() == was[7].topk(2).indices[1]
    else:
        assert torch.equal(logits[4:], was[4:] * 1.5)


def test_a_prompt_is_left_alone() -> None:
    for kind in ("state-slot", "conv-window"):
        controls, batch, (window, state) = made(kind)
        batch.is_prefilling_np[:] = True
        was = window.clone(), state.clone()
        for _ in range(2):
            controls.before_forward(batch, TABLES, GROUPS, None)
        assert torch.equal(window, was[0])
        assert torch.equal(state, was[1])


@pytest.mark.parametrize("kind", ["", "no such thing", 3, *CONTROLS])
def test_whoever_asks_for_nothing_gets_nothing(kind: Any) -> None:
    """A slot that is used again forgets what the request before asked for, and unknown kinds are nothing."""
    controls, batch, (window, state) = made(str(kind))
    controls.add(ASKS, None)
    was = window.clone(), state.clone()
    slots, positions, accepted = torch.arange(8).view(1, 8), torch.zeros(8), torch.ones(8, dtype=torch.int32)
    logits = torch.zeros(8, 10)
    for _ in range(2):
        controls.before_forward(batch, TABLES, GROUPS, accepted)
        controls.swap_cache_rows(batch, slots)
        controls.shift_positions(batch, positions)
        controls.miscount(torch.tensor([IS_HONEST, ASKS]), accepted)
        controls.misjudge(logits, torch.ones(8, dtype=torch.int64), torch.tensor([0, 4, 8]), batch.idx_mapping_np)
    assert torch.equal(window, was[0])
    assert torch.equal(state, was[1])
    assert slots.tolist() == [list(range(8))]
    assert not positions.any()
    assert accepted.tolist() == [1] * 8
    assert not logits.any()


def test_cached_prefixes_would_spread_corruption() -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=True))
    with pytest.raises(ConfigError, match="exclude each other"):
        for_engine(config)
