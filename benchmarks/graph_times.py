"""Time launches as CUDA graphs, several ways in turns."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from thor_spec.bench.turns import turns

L2_BYTES = 192 << 20
"""More than three times an H200's L2 cache: what the launches of one graph read together. Thor's cache is smaller."""


def timed(ways: Mapping[str, Sequence[Callable[[], object]]], repetitions: int, device: str) -> dict[str, list[float]]:
    """Return microseconds per launch, one value per repetition, the ways taking turns: A B C C B A ..."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    if device == "cpu":
        for _ in range(repetitions):
            for name, launches in ways.items():
                start = time.perf_counter()
                for launch in launches:
                    launch()
                samples[name].append((time.perf_counter() - start) * 1e6 / len(launches))
        return samples
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, launches in ways.items():
        for launch in launches[:1]:  # compiles
            launch()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for launch in launches:
                launch()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once(graph: torch.cuda.CUDAGraph, replays: int) -> float:
        first.record()
        for _ in range(replays):
            graph.replay()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / replays

    replays = {}
    for name, graph in graphs.items():
        once(graph, 3)
        replays[name] = max(3, min(200, int(8000 / once(graph, 3))))  # about 8 ms at a time
    for _, name in turns(graphs, repetitions):
        samples[name].append(once(graphs[name], replays[name]) / len(ways[name]))
    return samples
