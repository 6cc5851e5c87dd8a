"""vLLM's Prometheus metrics, as far as a launcher needs them."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCapacity:
    """What fits into the KV cache; vLLM's own figures."""

    tokens: int
    sequences: float
    """Of the configured context length, at the same time."""


def totals(text: str) -> dict[str, float]:
    """Return the value of each sample of ``/metrics`` by name, summed over its labels."""
    values: dict[str, float] = {}
    for family in _families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def by_label(text: str, name: str, label: str) -> dict[str, float]:
    """Return the values of one sample by one of its labels, summed over the others."""
    values: dict[str, float] = {}
    for family in _families(text):
        for sample in family.samples:
            if sample.name == name and label in sample.labels:
                values[sample.labels[label]] = values.get(sample.labels[label], 0.0) + sample.value
    return values


def kv_capacity(text: str) -> KVCapacity | None:
    """Return the KV cache's capacity, or None where this vLLM does not tell."""
    labels = cache_config(text)
    try:
        return KVCapacity(
            tokens=int(labels["kv_cache_size_tokens"]), sequences=float(labels["kv_cache_max_concurrency"])
        )
    except (KeyError, ValueError):
        return None


def cache_config(text: str) -> Mapping[str, str]:
    """Return how the engine caches, as vLLM tells it; empty where it does not."""
    families = (family for family in _families(text) if family.name.removesuffix("_info") == "vllm:cache_config")
    return next((sample.labels for family in families for sample in family.samples), {})


@functools.lru_cache(maxsize=1)  # the parser takes tens of milliseconds, and several questions go to one text
def _families(text: str) -> tuple[Any, ...]:
    return tuple(text_string_to_metric_families(text))
