"""What the engines count, as Prometheus counters beside vLLM's."""

import functools
from collections.abc import Iterator
from typing import Any

from thor_spec import env
from thor_spec.dflash.acceptance import RULES
from thor_spec.kernels.relax.reference import COUNTED
from thor_spec.kernels.tree_walk.reference import OF_TREES
from thor_spec.vllm_plugin import counters, drafting, reasons, reuse
from thor_spec.vllm_plugin.counters import PHASES_OF_TREES as PHASES

_HELP = {
    "drafted": "Drafted tokens that were judged, in steps with a relaxed request.",
    "accepted": "Drafted tokens that were taken, in steps with a relaxed request.",
    "relaxed": "Drafted tokens that were taken because a threshold allowed it.",
    "rejected": "Requests that drew another token than the draft, by its place.",
}


@functools.cache  # the registry refuses a second one
def register() -> None:
    """Have ``/metrics`` show them. Safe to call again."""
    from prometheus_client import REGISTRY

    REGISTRY.register(_Collector())


class _Collector:
    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        yield from _drafts(CounterMetricFamily)
        yield from _denoising(CounterMetricFamily)
        yield from _trees(CounterMetricFamily)
        yield from _tree_steps(CounterMetricFamily)
        yield from _reuse(CounterMetricFamily)
        yield from _lengths(CounterMetricFamily)


def _drafts(family_of: Any) -> Iterator[Any]:
    found = list(counters.read(counters.DRAFTS))
    for i, name in enumerate(COUNTED):
        family = family_of(f"thor_spec:{name}_tokens", _HELP[name], labels=("rule", "position"))
        for number, rule in enumerate(RULES):
            for place in range(found[0].shape[2] if found else 0):
                family.add_metric((rule, str(place)), float(sum(counts[number, i, place] for counts in found)))
        yield family


def _denoising(family_of: Any) -> Iterator[Any]:
    """Yield the counts of blocks; tokens a forward are their ``tokens`` over ``forwards``, and so on."""
    if found := list(counters.read(counters.DENOISING)):
        for number, (name, text) in enumerate(counters.DENOISING_COUNTS.items()):
            family = family_of(f"thor_spec:denoising_{name}", text)
            family.add_metric((), float(sum(counts[number] for counts in found)))
            yield family


def _trees(family_of: Any) -> Iterator[Any]:
    found = list(counters.read(counters.TREES))
    family = family_of(
        "thor_spec:trees",
        "Draft trees that were verified, by the number of their nodes, their depth, and their accepted drafts.",
        labels=("of", "number"),
    )
    for i, name in enumerate(OF_TREES):
        for number in range(found[0].shape[1] if found else 0):
            family.add_metric((name, str(number)), float(sum(counts[i, number] for counts in found)))
    yield family


def _tree_steps(family_of: Any) -> Iterator[Any]:
    """Yield how long the phases of steps with trees took, and what ``--tree auto`` chose."""
    if timed := list(counters.read(counters.PHASES)):
        family = family_of(
            "thor_spec:tree_phase_seconds",
            "Time of steps that verify trees, on the device, by phase.",
            labels=("phase",),
        )
        for place, name in enumerate(PHASES):
            family.add_metric((name,), float(sum(counts[place] for counts in timed)) / 1e9)
        yield family
        family = family_of("thor_spec:tree_timed_steps", "Steps in thor_spec:tree_phase_seconds.")
        family.add_metric((), float(sum(counts[-1] for counts in timed)))
        yield family
    if chosen := list(counters.read(counters.BUDGETS)):
        family = family_of(
            "thor_spec:tree_budgets",
            "Steps of --tree auto by the nodes that each request was to verify, as a tree or as a chain.",
            labels=("shape", "nodes"),
        )
        for row, name in enumerate(("tree", "chain")):
            for nodes in range(chosen[0].shape[1]):
                if count := sum(counts[row, nodes] for counts in chosen):
                    family.add_metric((name, str(nodes)), float(count))
        yield family


def _lengths(family_of: Any) -> Iterator[Any]:
    found = list(drafting.counted(env.receipts_dir()))
    for name, text in drafting.WHAT.items():
        family = family_of(f"thor_spec:draft_length_{name}", text, labels=("draft_tokens", "depth"))
        for what, length, depth, figure in found:
            if what == name:
                family.add_metric((str(length), f"{depth}+"), figure)
        yield family


def _reuse(family_of: Any) -> Iterator[Any]:
    counted = reuse.by_reason(env.receipts_dir())
    for i, (name, text) in enumerate(reasons.COUNTED.items()):
        family = family_of(f"{reasons.PREFIX}{name}", text, labels=("reason",))
        for reason, row in counted.items():
            family.add_metric((reason,), float(row[i]))
        yield family
