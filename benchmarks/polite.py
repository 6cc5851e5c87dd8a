"""A guarded command beside others, that takes its turn: gates let measurements in, and what is timed is timed alone.

    python benchmarks/polite.py verify prefix-cache nano-hybrid --kv-cache-memory 1GiB
    python benchmarks/polite.py bench agent --dummy qwen3.5-35b-a3b --kv-cache-memory 16GiB -- …

A gate takes minutes, in which nobody could measure if it held the machine all the while. So an engine has a share of it
(``quiet.py``) while it starts, and then a gate for each request, or each step of an engine of its own; ``bench agent``
and ``bench chat`` have all of it for each repetition. Engines must fit beside each other, as for ``beside.py``.
"""

import fcntl
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # the engine of verify tree runs this as a module

from beside import main as beside
from quiet import take


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1].endswith(".json"):  # the job of verify tree
        watch_politely()
        return
    from thor_spec.bench import agent, chat
    from thor_spec.gates import tree
    from thor_spec.gates.judging import Planned
    from thor_spec.serve.client import Server

    Planned.visit = starts(Planned.visit)  # type: ignore[method-assign]
    Server.post = holding(fcntl.LOCK_SH, Server.post)  # type: ignore[method-assign]
    agent.replay = holding(fcntl.LOCK_EX, agent.replay)
    chat.repeat = holding(fcntl.LOCK_EX, chat.repeat)  # type: ignore[attr-defined]  # what it imports it by
    tree.MODULE = "benchmarks.polite"
    beside()


def holding(kind: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which runs while it has the machine, or a share of it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with take(kind):
            return function(*args, **kwargs)

    return call


def starts(visit: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Planned.visit`` with a share of the machine until the engine is ready."""

    def started(self: Any, look: Callable[[Any], Any]) -> Any:
        with take(fcntl.LOCK_SH) as share:

            def ready(server: Any) -> Any:
                share.close()
                return look(server)

            return visit(self, ready)

    return started


def watch_politely() -> None:
    """Do the job of ``thor_spec.vllm_plugin.tree.check``, a share for each step."""
    from thor_spec.vllm_plugin.tree import check

    load = holding(fcntl.LOCK_SH, check.engine_of)

    def engine(job: Any) -> Any:
        llm = load(job)
        llm.llm_engine.step = holding(fcntl.LOCK_SH, llm.llm_engine.step)
        return llm

    check.engine_of = engine
    check.main()


if __name__ == "__main__":
    main()
