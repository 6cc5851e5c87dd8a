"""Let the clients that agents use drive sessions of tool calls through ``thor-spec serve``, alone and four at once.

    .venv/bin/python -m benchmarks.agent_clients [--sessions 20] [--turns 4]

The bundled hybrid knows no tools, so each call is asked for by name; a grammar then guides the answer, drafts included.
A session counts as malformed if one of its streamed calls does not parse, has another name, or arguments that the
schema does not allow. Writes a record; nothing in it is a speed.
"""

import argparse
import itertools
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.record import write
from tests.e2e import agents
from tests.e2e.served import Served

AT_ONCE = 4
COUNTED = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "tokens_reused": "vllm:prefix_cache_hits_total",
    "answered_tokens": "vllm:generation_tokens_total",
}
SERVE = ("--profile", "nano", "--profile", "agent", "--context", "2048", "--kv-cache-memory", str(256 << 20))
PASSED = ("--enable-prefix-caching",)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args()
    apis = list(itertools.islice(itertools.cycle(agents.DRIVERS), options.sessions))
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder), *SERVE, "--", *PASSED) as served:
        served.wait_ready()
        played = {
            "alone": play(served, apis, options.turns, at_once=1),
            "four at once": play(served, apis, options.turns, at_once=AT_ONCE),
        }
        ready = served.ready
        stopped = served.stop()
    malformed = sum(bool(s["malformed"]) for part in played.values() for s in part["sessions"])
    result = {
        "serve": [*SERVE, "--", *PASSED],
        "ready": {name: ready.get(name) for name in ("model", "drafter", "draft_tokens", "prefix_caching")},
        "clients": {name: metadata.version(name) for name in ("openai", "anthropic")},
        "malformed_sessions": malformed,
        "stopped_with": stopped,
        **played,
    }
    for name, part in played.items():
        calls = sum(session["calls"] for session in part["sessions"])
        print(f"{name}: {len(part['sessions'])} sessions, {calls} well-formed calls, {part['counted']}")
    print(f"{malformed} malformed", write("agent-clients", result), sep="\n")
    sys.exit(1 if malformed or stopped else 0)


def play(served: Served, apis: list[str], turns: int, *, at_once: int) -> dict[str, Any]:
    before = {name: served.metric(metric) for name, metric in COUNTED.items()}
    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        sessions = list(pool.map(lambda n: session(served, apis[n], n, turns), range(len(apis))))
    seconds = time.monotonic() - began
    counted = {name: served.metric(metric) - before[name] for name, metric in COUNTED.items()}
    return {"sessions": sessions, "seconds": round(seconds, 1), "counted": counted}


def session(served: Served, api: str, number: int, turns: int) -> dict[str, Any]:
    try:
        calls, malformed = agents.DRIVERS[api](served.url, number, turns), ""
    except (AssertionError, ValueError) as error:  # ValueError: JSON that does not parse, or not one call
        calls, malformed = 0, repr(error)
    return {"api": api, "calls": calls, "malformed": malformed}


if __name__ == "__main__":
    main()
