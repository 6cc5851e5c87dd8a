"""The worker of ``thor-spec tune moe``: times vLLM's fused-expert kernel; ``tune.search`` says how it talks.

Run as ``python -m thor_spec.vllm_plugin.expert_timing PROBLEM``.
"""

import json
import sys
from typing import Any

from thor_spec.errors import ThorSpecError
from thor_spec.vllm_plugin import compat

CALLS, REPEATS = 10, 10  # a graph holds so many calls, and is replayed so many times


def main() -> None:
    """Greet, then answer every line."""
    problem = json.loads(sys.argv[1])
    try:
        bench = Bench(**problem)
    except (ThorSpecError, ImportError, RuntimeError) as error:
        _say({"error": str(error)})
        return
    _say(bench.greeting())
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            bench.compile(asked["tokens"], asked["launch"])
            _say({"compiled": True})
            _say({"us": bench.measure(asked["tokens"], asked["launch"])})
        except Exception as error:  # noqa: BLE001  # any configuration may fail in any way, and the next one is tried
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
            if not bench.is_usable():  # after a wild access every launch of this process fails
                _say({**answer, "last": True})
                return
            _say(answer)


class Bench:
    """One layer's experts with made-up weights, and batches whose tokens choose experts evenly."""

    def __init__(self, experts: int, chosen: int, hidden: int, intermediate: int) -> None:
        import torch

        self._torch = torch
        if not torch.cuda.is_available():
            raise RuntimeError("there is no CUDA device, and elsewhere vLLM does not use these files.")
        self._experts = compat.FUSED_EXPERTS.resolve()
        self._override = compat.OVERRIDE_MOE_CONFIG.resolve()
        self._file = compat.MOE_CONFIG_FILE.resolve()(experts, intermediate, None)
        self._shape = experts, chosen, hidden
        settings: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self._up = torch.randn(experts, 2 * intermediate, hidden, **settings) * hidden**-0.5
        self._down = torch.randn(experts, hidden, intermediate, **settings) * intermediate**-0.5

    def is_usable(self) -> bool:
        """Return whether the device still takes work from this process."""
        try:
            self._torch.zeros(1, device="cuda").add_(1)
            self._torch.cuda.synchronize()
        except Exception:  # noqa: BLE001  # what is broken says so in many ways
            return False
        return True

    def greeting(self) -> dict[str, Any]:
        """Return vLLM's name for the file, and the device's capability."""
        return {"file": self._file, "capability": list(self._torch.cuda.get_device_capability())}

    def compile(self, tokens: int, launch: dict[str, int]) -> None:
        """Run once."""
        self._run(self._batch(tokens), launch)
        self._torch.cuda.synchronize()

    def measure(self, tokens: int, launch: dict[str, int]) -> float:
        """Return microseconds of a call, the median over replays of a captured graph."""
        torch, batch = self._torch, self._batch(tokens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                self._run(batch, launch)
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
        graph.replay()
        for begin, end in marks:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times = sorted(begin.elapsed_time(end) for begin, end in marks)
        return float(1000 * times[REPEATS // 2] / CALLS)

    def _batch(self, tokens: int) -> tuple[Any, Any, Any]:
        torch, (experts, chosen, hidden) = self._torch, self._shape
        dice = torch.Generator(device="cuda").manual_seed(tokens)
        x = torch.randn(tokens, hidden, generator=dice, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, experts, generator=dice, device="cuda").topk(chosen).indices.int()
        return x, torch.full((tokens, chosen), 1 / chosen, device="cuda"), ids

    def _run(self, batch: tuple[Any, Any, Any], launch: dict[str, int]) -> None:
        x, weights, ids = batch
        with self._override(launch):
            self._experts(x, self._up, self._down, weights, ids)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
