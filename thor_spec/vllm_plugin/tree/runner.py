"""Where ``--tree auto`` meets vLLM's runner: steps are trimmed, graphs of every size captured and timed.

Wrapped on first use, since the modules are heavy; engines without ``auto`` pass through.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.tree import choice
from thor_spec.vllm_plugin.tree.budget import Budget

REPEATS = 5
CONTEXTS = (256, 4096, 32768)


def install() -> None:
    """Wrap what is needed. Safe to call again."""
    compat.EXECUTE_MODEL.wrap(_execute)
    compat.SAMPLE_TOKENS.wrap(_sample)
    compat.CAPTURE_MODEL.wrap(_capture)
    compat.GRAPH_CANDIDATES.wrap(_candidates)


def _budget(runner: Any) -> Budget | None:
    trees = getattr(getattr(runner, "model_state", None), "trees", None)
    return getattr(trees, "budget", None)


def _execute(stock: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(self: Any, scheduler_output: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> Any:
        budget = _budget(self)
        if budget is not None and not dummy_run:
            if not budget.is_ready and not _will_capture(self):
                budget.is_ready = True
            scheduler_output = budget.trimmed(scheduler_output)
        return stock(self, scheduler_output, *args, dummy_run=dummy_run, **kwargs)

    return execute_model


def _will_capture(runner: Any) -> bool:
    manager = runner.cudagraph_manager
    return manager is not None and bool(manager.needs_capture())


def _sample(stock: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        budget = _budget(self)
        return stock(self, grammar_output if budget is None else budget.trimmed_grammar(grammar_output))

    return sample_tokens


def _capture(stock: Callable[..., Any]) -> Callable[..., Any]:
    def capture_model(self: Any, *, profile_only: bool = False) -> int:
        used: int = stock(self, profile_only=profile_only)
        budget = _budget(self)
        if budget is not None and not profile_only and not budget.is_ready:
            most = max(choice.rows_of_graphs(self.cudagraph_manager), default=1)
            if widths := choice.widths_of_graphs(self.cudagraph_manager):
                budget.limit({width - 1 for width in widths})
            fit(self, budget, rows=sorted({1, most}))
            budget.is_ready = True
        return used

    return capture_model


def _candidates(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``CudaGraphManager._init_candidates``, which has every size captured for as many rows as the largest."""

    def init_candidates(self: Any) -> None:
        stock(self)
        shape = choice.shape(self.vllm_config)
        if shape is None or not shape.auto or self.decode_query_len != shape.nodes + 1:
            return
        full = [mode for mode in self._capture_descs if mode.name == "FULL"]
        if not full:
            return
        largest = [desc for desc in self._capture_descs[full[0]] if desc.uniform_token_count == self.decode_query_len]
        rows = sorted({desc.num_reqs for desc in largest})
        fresh = []
        for size in shape.sizes(choice.deep(self.vllm_config))[:-1]:
            width = size + 1
            for count in range(1, (rows or [0])[-1] + 1):
                padded = next(n for n in rows if n >= count)
                for like in (desc for desc in largest if desc.num_reqs == padded):
                    desc = replace(like, num_tokens=padded * width, uniform_token_count=width)
                    self._candidates.setdefault((count * width, like.num_active_loras), []).insert(0, desc)
                    if desc not in fresh:
                        fresh.append(desc)
        self._capture_descs[full[0]] = sorted(
            [*self._capture_descs[full[0]], *fresh], key=lambda desc: desc.num_tokens, reverse=True
        )

    return init_candidates


def fit(runner: Any, budget: Budget, *, rows: list[int], contexts: tuple[int, ...] = CONTEXTS) -> None:
    """Measure what each size costs, by rows and context. It may wait for the device: nobody is served yet."""
    started = time.perf_counter()
    longest = runner.max_model_len - budget.sizes[-1] - 2
    for count in (n for n in rows if n * (budget.sizes[-1] + 1) <= runner.max_num_tokens):
        for context in sorted({min(context, longest) for context in contexts}):
            budget.table.seed(count, context, tuple(_seconds(runner, count, n, context) for n in budget.sizes))
    sizes = ", ".join(map(str, budget.sizes))
    of_one = ", ".join(f"{1e3 * x:.2f}" for x in budget.table.at(1, contexts[0]).verify)
    budget.seeded(
        f"measured passes of {sizes} nodes in {time.perf_counter() - started:.1f} s; one request at {contexts[0]} "
        f"tokens: {of_one} ms"
    )
    compat.LOG.info("Draft trees: %s.", budget.described)


def _seconds(runner: Any, rows: int, nodes: int, context: int) -> float:
    """Return the median time of the target's pass over ``rows`` trees of ``nodes`` nodes, with its logits."""
    output: Any = compat.SCHEDULER_OUTPUT.resolve().make_empty()
    output.num_scheduled_tokens = {f"_dummy_req_{i}": nodes + 1 for i in range(rows)}
    output.total_num_scheduled_tokens = rows * (nodes + 1)
    trees, on_gpu = runner.model_state.trees, runner.device.type == "cuda"
    times: list[float] = []
    for _ in range(REPEATS + 1):
        marks: list[Any] = []
        with torch.inference_mode():
            trees.timing = lambda marks=marks: marks.append(_now(on_gpu=on_gpu))
            try:
                runner.execute_model(output, dummy_run=True, context_len=context, valid_dummy_state_slots=True)
                hidden = runner.execute_model_state.hidden_states
                runner.model.compute_logits(hidden[: output.total_num_scheduled_tokens])
            finally:
                trees.timing = runner.execute_model_state = None
        marks.append(_now(on_gpu=on_gpu))
        if on_gpu:
            marks[-1].synchronize()
        times.append(marks[0].elapsed_time(marks[-1]) / 1e3 if on_gpu else marks[-1] - marks[0])
    return median(times[1:])  # the first one warms


def _now(*, on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
