"""Planted corruption hits what it names, in the requests that asked for it, and nothing else."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from thor_spec.config import CACHED_CONTROLS, CONTROLS
from thor_spec.vllm_plugin.cached_controls import CachedControls
from thor_spec.vllm_plugin.controls import Controls
from thor_spec.vllm_plugin.options import CONTROL_KEY

ASKS, IS_HONEST = 5, 2  # request slots


def made(kind: str) -> tuple[Controls, Any, tuple[torch.Tensor, torch.Tensor]]:
    """Controls with one request of a kind and an honest one, their batch, and a recurrent layer's cache."""
    g = torch.Generator().manual_seed(1)
    cache = (torch.randn(8, 6, 4, generator=g), torch.randn(8, 2, 3, 3, generator=g))
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"gdn": SimpleNamespace(kv_cache=cache)}),
    )
    controls = Controls(config)
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


def cached(kind: str, computed: int = 8) -> tuple[Any, dict[str, Any]]:
    """A step of one request, 8 tokens of which come from the cache in blocks of 4, after corruption; and the caches."""
    caches = {
        "model.layers.0.linear": SimpleNamespace(kv_cache=(torch.ones(6, 2, 3), torch.ones(6, 2, 2))),
        "model.layers.1.attn": SimpleNamespace(kv_cache=torch.ones(2, 12, 5)),  # two kernel blocks in one of the pool
        "model.layers.2.attn": SimpleNamespace(kv_cache=torch.ones(2, 12, 5)),  # the drafter's
    }
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=caches),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2)),
    )
    controls = CachedControls(config)
    controls.add(IS_HONEST, None, computed)
    controls.add(ASKS, {CONTROL_KEY: kind}, computed)
    groups = [
        SimpleNamespace(layer_names=[name], kv_cache_spec=SimpleNamespace(block_size=4, **more))
        for name, more in zip(caches, ({"mamba_type": "gdn"}, {}, {}), strict=True)
    ]
    tables = (
        torch.tensor([[1, 2, 0], [3, 4, 0]]),
        torch.tensor([[2, 3, 4, 5, 0], [6, 7, 8, 9, 0]]),
        torch.tensor([[2, 3, 4, 5, 0], [6, 7, 8, 9, 0]]),
    )
    step = lambda: controls.before_step(  # noqa: E731
        np.array([IS_HONEST, ASKS]), tables, SimpleNamespace(kv_cache_groups=groups, num_blocks=6)
    )
    step()
    return step, {name.split(".")[2]: layer.kv_cache for name, layer in caches.items()}


def negative(cache: torch.Tensor, dim: int) -> list[int]:
    return [i for i in range(cache.shape[dim]) if (cache.select(dim, i) < 0).all()]


@pytest.mark.parametrize("kind", CACHED_CONTROLS)
def test_what_a_request_is_given_from_the_cache(kind: str) -> None:
    step, caches = cached(kind)
    window, state = caches["0"]
    found = negative(window, 0), negative(state, 0), negative(caches["1"], 1), negative(caches["2"], 1)
    assert (
        found
        == {
            "cached-window": ([4], [], [], []),
            "cached-state": ([], [4], [], []),
            "cached-keys": ([], [], [6, 7, 8, 9], []),
            "cached-drafts": ([], [], [], [6, 7, 8, 9]),
        }[kind]
    )
    step()  # only the first step of a request
    assert (negative(window, 0), negative(state, 0), negative(caches["1"], 1), negative(caches["2"], 1)) == found


@pytest.mark.parametrize(("kind", "computed"), [("cached-state", 0), ("state-slot", 8), ("", 8)])
def test_what_is_not_from_the_cache_is_left_alone(kind: str, computed: int) -> None:
    _, caches = cached(kind, computed)
    assert not any((cache < 0).any() for cache in (*caches["0"], caches["1"], caches["2"]))
