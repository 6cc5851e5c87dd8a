"""An engine in a process of its own, which takes its memory with it: a benchmark script runs itself again."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from thor_spec.config import ServeConfig
from thor_spec.serve import command
from thor_spec.vllm_plugin.seam import has_gpu_build

ROOT = Path(__file__).parent.parent
MARK = "ANSWER "
READY = "ready"
PROCESSORS = 8


class Engine:
    """A process of this script that answers questions, so that several engines can be measured turn about.

    The script hands its answers to ``serve``. Engines that wait for a question leave the GPU to the others.
    """

    _is_ready = False

    def __init__(
        self,
        *arguments: str,
        what: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        over: Mapping[str, str] | None = None,
    ) -> None:
        """Start this script with its own arguments and these.

        Args:
            what: of the engine, for the message should it fail.
            log: where its errors go.
            environment: what is set unless the caller's environment says otherwise.
            over: what is set whatever that says; what an engine with our plugin needs by default.
        """
        self.what, self.log = what, log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(sys.argv[0]).resolve()), *sys.argv[1:], *arguments],
                cwd=ROOT,
                env={**(environment or {}), **os.environ, **(variables() if over is None else over)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ready(self) -> None:
        """Wait until the engine has started."""
        if not self._is_ready:
            self._is_ready = self._answer() == READY

    def ask(self, question: Any = None) -> Any:
        """Return the answer to a question; both are anything that JSON holds."""
        self.ready()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # what it died of is in its log
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        printed: list[str] = []
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            printed.append(line)
        self.process.wait()
        raise SystemExit(f"{self.what} failed:\n{self.log.read_text()[-6000:]}\n{''.join(printed)[-3000:]}")


def serve(answer: Callable[[Any], Any]) -> None:
    """In the process of an ``Engine``, once it has started: answer questions until there are no more."""
    print(MARK + json.dumps(READY), flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps(answer(json.loads(line))), flush=True)
    os._exit(0)  # the memory is free at once


def run_again(*arguments: str, what: str, log: Path, environment: Mapping[str, str] | None = None) -> Any:
    """Run this script with its own arguments and these; return its answer to one question."""
    with Engine(*arguments, what=what, log=log, environment=environment) as engine:
        return engine.ask()


def share_processors() -> None:
    """Have this process and the engines that it starts run on the same few processors.

    Where a process runs makes more of a difference to a step of a small model than what is compared.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:PROCESSORS])


def decoding_in_graphs(sizes: Sequence[int]) -> dict[str, Any]:
    """Return a compilation config: nothing is compiled, and decode steps of so many tokens are captured."""
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [*sizes]}


def runner_of(llm: Any) -> Any:
    """Return the model runner of an ``LLM`` in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def variables() -> dict[str, str]:
    """Return what ``thor-spec serve`` gives an engine, and what keeps it in the process that asks it."""
    served = command.environment(ServeConfig(), gpu=has_gpu_build(), stock=False)
    return {**served, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
