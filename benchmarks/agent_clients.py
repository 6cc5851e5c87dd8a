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

import httpx

from benchmarks.record import write
from tests.e2e import agents
from tests.e2e.served import Served
from thor_spec.serve.metrics import totals

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
    parser.add_argument("--url", help="a running server of tiny-hybrid that caches prefixes")
    options = parser.parse_args()
    if options.url:
        drive(options.url, options, {"serve": "a running server"})
        return
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder), *SERVE, "--", *PASSED) as served:
        ready = served.wait_ready().ready
        told = {name: ready.get(name) for name in ("model", "drafter", "draft_tokens", "prefix_caching")}
        drive(served.url, options, {"serve": [*SERVE, "--", *PASSED], "ready": told})
        served.stop()


def drive(url: str, options: argparse.Namespace, how: dict[str, Any]) -> None:
    apis = list(itertools.islice(itertools.cycle(agents.DRIVERS), options.sessions))
    played = {
        "alone": play(url, apis, options.turns, at_once=1),
        "four at once": play(url, apis, options.turns, at_once=AT_ONCE),
    }
    malformed = sum(bool(s["malformed"]) for part in played.values() for s in part["sessions"])
    clients = {name: metadata.version(name) for name in ("openai", "anthropic")}
    for name, part in played.items():
        calls = sum(session["calls"] for session in part["sessions"])
        print(f"{name}: {len(part['sessions'])} sessions, {calls} well-formed calls, {part['counted']}")
    record = write("agent-clients", {**how, "clients": clients, "malformed_sessions": malformed, **played})
    print(f"{malformed} malformed", record, sep="\n")
    if malformed:
        sys.exit(1)


def play(url: str, apis: list[str], turns: int, *, at_once: int) -> dict[str, Any]:
    before = counted(url)
    began = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        sessions = list(pool.map(lambda n: session(url, apis[n], n, turns), range(len(apis))))
    seconds = round(time.monotonic() - began, 1)
    return {
        "sessions": sessions,
        "seconds": seconds,
        "counted": {name: value - before[name] for name, value in counted(url).items()},
    }


def counted(url: str) -> dict[str, float]:
    time.sleep(1)  # the engine answers first and counts then
    found = totals(httpx.get(f"{url}/metrics").text)
    return {name: found.get(metric, 0.0) for name, metric in COUNTED.items()}


def session(url: str, api: str, number: int, turns: int) -> dict[str, Any]:
    try:
        calls, malformed = agents.DRIVERS[api](url, number, turns), ""
    except (AssertionError, ValueError) as error:  # ValueError: JSON that does not parse, or not one call
        calls, malformed = 0, repr(error)
    return {"api": api, "calls": calls, "malformed": malformed}


if __name__ == "__main__":
    main()
