"""How steps are trimmed and timed, with a scheduler and a device that are played."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from thor_spec.ddtree.shape import TreeShape
from thor_spec.kernels.tree_build.reference import Trees, build_trees
from thor_spec.vllm_plugin import compat, counters
from thor_spec.vllm_plugin.tree import runner as hooks
from thor_spec.vllm_plugin.tree.budget import RING, Budget
from thor_spec.vllm_plugin.tree.clock import EVERY, Clock

PARALLEL = SimpleNamespace(rank=0, tensor_parallel_size=1)
SHAPE = TreeShape(nodes=12, auto=True)
PHASES = counters.PHASES_OF_TREES
CPU = torch.device("cpu")


def ready(seconds_per_node: float = 0.0) -> Budget:
    budget = Budget(SHAPE, 7, CPU, PARALLEL)
    budget.table.seed(1, 256, tuple(1 + seconds_per_node * n for n in budget.sizes))
    budget.seeded()
    budget.is_ready = True
    return budget


def played(budget: Budget, seconds: dict[int, float], steps: int, settled: int | None = None) -> list[int]:
    """Let steps take ``seconds`` by size, of which one in eight is timed, as on a GPU; return what was verified.

    ``settled``: what is verified from the 200th step on, but for trials.
    """
    found = []
    for step in range(steps):
        tell(budget, spread=1.0, accepted=2)
        found.append(budget.trimmed(scheduled(12)).num_scheduled_tokens["r0"] - 1)
        if settled is not None and step >= 200 and found[-1] != settled:
            assert budget.is_wanted  # a trial that nobody times is for nothing
        if budget.is_wanted or step % 8 == 0:
            budget.heard(budget.label, budget.label, seconds[found[-1]])
    return found


@pytest.mark.parametrize("seeds", [(0.4,) * 7, (0.4, 0.4, 0.4, 0.4, 1.5, 1.6, 1.7)], ids=["idle", "disturbed"])
def test_all_nodes_where_the_host_hides_their_cost(seeds: tuple[float, ...]) -> None:
    """Also if others were busy while the start-up measured passes."""
    budget = Budget(SHAPE, 7, CPU, PARALLEL)
    budget.table.seed(1, 256, seeds)
    budget.seeded()
    budget.is_ready = True
    chosen = played(budget, dict.fromkeys(budget.sizes, 4.2), 400, settled=12)
    assert sum(nodes == 12 for nodes in chosen[200:]) > 185
    assert set(chosen) == set(budget.sizes)  # each was tried


def test_few_nodes_where_they_are_dear() -> None:
    budget = ready()  # passes all take the same, steps do not
    chosen = played(budget, {n: 1 + 0.5 * n for n in budget.sizes}, 400)
    assert sum(nodes <= 2 for nodes in chosen[200:]) > 180


def test_what_became_cheap_is_noticed() -> None:
    budget = ready()
    played(budget, {n: 1 + 0.5 * n for n in budget.sizes}, 200)
    chosen = played(budget, dict.fromkeys(budget.sizes, 4.0), 3000)
    assert sum(nodes >= 7 for nodes in chosen[-500:]) > 450


def test_a_step_before_one_of_another_kind_says_nothing() -> None:
    budget = ready()
    for following, known in ((None, 0), ((2, 40, 4), 0), ((1, 41, 12), 1)):
        budget.heard((1, 40, 4), following, 9.0)
        budget.heard(None, following, 9.0)
        assert sum(budget.table.counts()) == known


def test_a_size_without_a_graph_is_no_choice() -> None:
    budget = Budget(SHAPE, 7, CPU, PARALLEL)
    budget.limit({1, 4, 7, 12})
    assert budget.sizes == (1, 4, 7, 12)
    budget.is_ready = True
    chosen = played(budget, {n: 1 + 0.1 * n for n in budget.sizes}, 300)
    assert set(chosen) == {1, 4, 7, 12}
    budget.limit(())
    assert budget.sizes == (12,)


def scheduled(*drafts: int, prompts: tuple[int, ...] = ()) -> Any:
    names = [f"r{i}" for i in range(len(drafts) + len(prompts))]
    counts = {name: 1 + n for name, n in zip(names, drafts, strict=False)} | {
        f"r{len(drafts) + i}": n for i, n in enumerate(prompts)
    }
    return SimpleNamespace(
        scheduled_spec_decode_tokens={f"r{i}": [-1] * n for i, n in enumerate(drafts) if n},
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[40] * len(drafts)),
    )


@cache
def drafted(spread: float) -> tuple[torch.Tensor, Trees]:
    scores = (spread * -torch.arange(6.0)).repeat(1, 7, 1).log_softmax(-1).contiguous()
    tokens, no_chains = torch.zeros(1, 7, 6, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    return scores, build_trees(scores, tokens, no_chains, nodes=12)


def tell(budget: Budget, spread: float, accepted: int = 0) -> bool:
    """Draft from marginals that are sharp, or flat, and have that told; return whether a chain was asked for."""
    scores, trees = drafted(spread)
    is_chain = budget.draft()
    budget.tell(trees, scores, torch.ones(1, dtype=torch.int32), torch.tensor([1 + accepted]))
    return is_chain


def test_a_step_is_trimmed_and_the_scheduler_keeps_its_own() -> None:
    budget = ready(seconds_per_node=0.5)
    tell(budget, spread=0.1)
    tell(budget, spread=0.1)
    output = scheduled(12, 12, 3, prompts=(50,))
    found = budget.trimmed(output)
    assert output.num_scheduled_tokens == {"r0": 13, "r1": 13, "r2": 4, "r3": 50}
    assert found.num_scheduled_tokens == {"r0": 2, "r1": 2, "r2": 2, "r3": 50}  # flat marginals, dear nodes: one
    assert found.total_num_scheduled_tokens == 56
    assert [len(x) for x in found.scheduled_spec_decode_tokens.values()] == [1, 1, 1]
    assert [len(x) for x in output.scheduled_spec_decode_tokens.values()] == [12, 12, 3]
    assert budget.label is None  # a prompt says nothing about what verification costs
    budget.trimmed(scheduled(12, 12))
    assert budget.label == (2, 40, 1)
    assert budget.counted.counts.sum() == 2
    assert budget.trimmed(scheduled(0)).num_scheduled_tokens == {"r0": 1}


def test_more_nodes_where_they_are_cheap() -> None:
    budget = ready()
    tell(budget, spread=1.0)
    assert not tell(budget, spread=1.0)
    assert budget.trimmed(scheduled(12)).num_scheduled_tokens == {"r0": 13}


def test_nothing_is_trimmed_before_the_start_up_is_over() -> None:
    budget = Budget(SHAPE, 7, CPU, PARALLEL)
    output = scheduled(12)
    assert budget.trimmed(output) is output
    budget.is_ready = True
    tried = {budget.trimmed(scheduled(12)).num_scheduled_tokens["r0"] - 1 for _ in range(20)}
    assert tried == {1, 2, 4, 6, 7}  # without graphs every size is tried; chains are no longer than 7


def test_chains_where_trees_do_not_keep_their_word() -> None:
    budget = ready()
    kinds = []
    for _ in range(400):
        kinds.append(tell(budget, spread=1.5, accepted=4 if budget._drafted.chain else 0))
        budget.trimmed(scheduled(12))
    assert sum(kinds[200:]) > 190
    assert not all(kinds)


def test_masks_of_drafts_that_are_not_verified_are_left_out() -> None:
    budget = ready(seconds_per_node=0.5)
    tell(budget, spread=0.1)
    tell(budget, spread=0.1)
    budget.trimmed(scheduled(3, 12, 0))
    masks = np.arange(4 + 13 + 1)[:, None]
    grammar = compat_grammar(["r0", "r2", "r1"], np.concatenate([masks[:4], masks[17:], masks[4:17]]))
    found = budget.trimmed_grammar(grammar).grammar_bitmask[:, 0].tolist()
    assert found == [0, 1, 17, 4, 5]
    assert budget.trimmed_grammar(None) is None


def compat_grammar(names: list[str], masks: np.ndarray) -> Any:
    from vllm.v1.core.sched.output import GrammarOutput

    return GrammarOutput(names, masks)


class Event:
    """A CUDA event on a device that is ``late`` steps behind."""

    now = 0.0
    reached = float("inf")

    def __init__(self, **_: Any) -> None:
        self.at = float("nan")

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.reached

    def elapsed_time(self, other: "Event") -> float:
        return other.at - self.at


def test_phases_are_read_late_and_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    heard: list[tuple[Any, Any, float]] = []
    writer = counters.HostWriter.open((len(PHASES) + 1,), counters.PHASES, PARALLEL)
    clock = Clock(torch.device("cuda"), writer, lambda *told: heard.append(told))
    marks = ("verified", "walked", "commit", "committed", "draft", "drafted", "built")

    def step(number: int, *, wanted: bool = True) -> None:
        Event.now = 100.0 * number
        clock.begin(number, wanted=wanted)
        for i, mark in enumerate(marks, start=1):
            Event.now = 100.0 * number + i * 10
            clock.mark(mark)

    Event.reached = -1.0
    for number in range(7):  # the device does not get on: the fifth step and later ones are not timed
        step(number)
    assert not heard
    Event.reached = 250.0
    step(7)
    assert [label for label, _, _ in heard] == [0, 1]
    Event.reached = 1e9
    Event.now = 900.0
    clock.begin(None)
    assert [(label, following) for label, following, _ in heard] == [(0, 1), (1, 2), (2, 3), (3, 4), (7, None)]
    assert [round(1e3 * whole) for _, _, whole in heard] == [100, 100, 100, 100, 200]
    *phases, timed = writer.counts.tolist()
    assert timed == 5
    assert phases == [5 * 10 * 10**6] * 5
    for number in range(10, 10 + 4 * EVERY):  # nobody wants to know in particular
        step(number, wanted=False)
    Event.reached = 1e9
    clock.begin(None)
    assert writer.counts[-1] == 5 + 4


def test_a_step_that_samples_nothing_is_not_timed() -> None:
    heard: list[Any] = []
    writer = counters.HostWriter.open((len(PHASES) + 1,), counters.PHASES, PARALLEL)
    clock = Clock(CPU, writer, lambda *told: heard.append(told))
    clock.begin("a")
    clock.mark("commit")
    clock.begin("b")
    clock.begin("c")
    assert not heard
    assert writer.counts.sum() == 0


def test_numbers_that_do_not_arrive_are_not_waited_for() -> None:
    budget = ready()
    budget._events = [SimpleNamespace(record=lambda: None, query=lambda: False) for _ in range(RING)]
    for _ in range(3 * RING):
        tell(budget, spread=1.0)
    assert len(budget._under_way) == RING
    assert len({id(news.numbers) for news in budget._under_way}) == RING
    assert budget.trimmed(scheduled(12)).num_scheduled_tokens == {"r0": 8}  # nothing is known: the whole chain


def test_graphs_of_every_size() -> None:
    """For as many rows as the largest has graphs; a step finds the smallest that holds it."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

    def stock(self: Any) -> None:
        self._capture_descs = {
            CUDAGraphMode.FULL: [
                BatchExecutionDescriptor(CUDAGraphMode.FULL, 13 * n, n, uniform_token_count=13) for n in (4, 2, 1)
            ]
        }
        self._candidates = {}

    config = SimpleNamespace(
        additional_config={"thor_spec": {"tree": "auto,12"}},
        speculative_config=SimpleNamespace(
            draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(block_size=8)), num_speculative_tokens=12
        ),
    )
    manager: Any = CudaGraphManager.__new__(CudaGraphManager)
    manager.vllm_config, manager.decode_query_len = config, 13
    manager._lora_dispatch_map, manager._graphs_captured = {}, True
    hooks._candidates(stock)(manager)
    widths = sorted({desc.uniform_token_count for desc in manager._capture_descs[CUDAGraphMode.FULL]})
    assert widths == [2, 3, 5, 7, 8, 9, 13]
    assert len(manager._capture_descs[CUDAGraphMode.FULL]) == 3 * len(widths)
    for rows, padded in ((1, 1), (2, 2), (3, 4), (4, 4)):
        for width in widths[:-1]:
            found = manager.dispatch(rows, rows * width, width, 0)
            assert (found.cg_mode, found.num_reqs, found.uniform_token_count) == (CUDAGraphMode.FULL, padded, width)
    other: Any = CudaGraphManager.__new__(CudaGraphManager)
    other.vllm_config, other.decode_query_len = config, 8  # the drafter's
    hooks._candidates(stock)(other)
    assert len(other._capture_descs[CUDAGraphMode.FULL]) == 3


def test_after_capture_only_sizes_with_graphs_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(SHAPE, 7, CPU, PARALLEL)
    graphs = [SimpleNamespace(num_reqs=n, uniform_token_count=width) for n in (1, 2) for width in (2, 8, 13)]
    runner = SimpleNamespace(
        cudagraph_manager=SimpleNamespace(graphs=[*graphs, SimpleNamespace(num_reqs=None, uniform_token_count=None)]),
        model_state=SimpleNamespace(trees=SimpleNamespace(budget=budget)),
    )
    fitted: list[list[int]] = []
    monkeypatch.setattr(hooks, "fit", lambda _runner, _budget, *, rows: fitted.append(rows))
    assert hooks._capture(lambda _, **__: 7)(runner) == 7
    assert budget.sizes == budget.table.sizes == (1, 7, 12)
    assert budget.is_ready
    assert fitted == [[1, 2]]


def test_the_wraps_are_put_on_once_and_let_others_through() -> None:
    hooks.install()
    runner = compat.MODEL_RUNNER.resolve()
    wrapped = runner.execute_model
    hooks.install()
    assert runner.execute_model is wrapped
    assert wrapped.thor_spec
    called = hooks._execute(lambda _, output, **kwargs: (output, kwargs))
    assert called(SimpleNamespace(), "given", dummy_run=True) == ("given", {"dummy_run": True})
