"""A server for agents, which caches prefixes: the gate over it is green, and red for each corruption of the cache."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e import agents
from tests.e2e.served import Served
from thor_spec.config import CACHED_CONTROLS
from thor_spec.errors import ThorSpecError
from thor_spec.gates.gate import Options
from thor_spec.gates.prefix_cache import PrefixCache
from thor_spec.serve import metrics
from thor_spec.serve.client import Server


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    size = ("--context", "2048", "--draft-tokens", "7", "--kv-cache-memory", "256MiB")
    passed = ("--enable-prefix-caching", "--max-logprobs", "-1")
    profile = ("--profile", "tiny", "--profile", "agent", "--allow-controls")
    with Served(tmp_path_factory.mktemp("caching"), *profile, *size, "--", *passed) as served:
        yield served.wait_ready()
        assert served.stop() == 0


@pytest.fixture(scope="module")
def server(served: Served) -> Iterator[Server]:
    with Server(served.url) as found:
        yield found


def test_the_gate_is_green_and_sees_what_is_planted(server: Server) -> None:
    options = Options(conversations=4)
    found = PrefixCache().candidate(server, options)
    verdict = PrefixCache().verdict(found, options)
    assert verdict.passed, verdict.as_text()
    assert all(verdict.figures[kind]["seen"] for kind in CACHED_CONTROLS)
    assert verdict.figures["alone"]["tokens_reused"] > 0
    # One core, one order of sums: nothing but the cache could tell these requests apart.
    assert verdict.figures["alone"]["same_bits"] == verdict.figures["alone"]["requests"]


def test_what_is_corrupted_is_given_to_nobody_else(server: Server) -> None:
    honest = server.complete("The river bends", max_tokens=8).tokens
    with pytest.raises(ThorSpecError, match="needs a cache_salt"):
        server.complete("x", max_tokens=1, thor_spec={"control": "cached-state"})
    with pytest.raises(ThorSpecError, match="is not one of cached-state"):
        server.complete("x", max_tokens=1, thor_spec={"control": "state-slot"})
    assert server.complete("The river bends", max_tokens=8).tokens == honest


def test_reuse_is_told(served: Served, server: Server) -> None:
    """By request in its usage, and by reason in the metrics."""
    assert "prefix cache" in served.ready["checks"]
    assert served.ready["prefix_caching"] == "on (asked for)"
    ids = list(server.complete("Once upon a time", max_tokens=1).prompt)
    prompt = (ids * 40)[:600]
    before = metrics.by_label(server.metrics(), "thor_spec:prefix_cache_requests_total", "reason")
    cached = [server.complete(prompt, max_tokens=1, cache_salt="told").cached for _ in range(2)]
    after = metrics.by_label(server.metrics(), "thor_spec:prefix_cache_requests_total", "reason")
    assert cached == [0, 512]
    assert {name: after[name] - before[name] for name in ("first", "hit")} == {"first": 1, "hit": 1}


@pytest.mark.parametrize("api", agents.DRIVERS)
def test_an_agents_session(served: Served, api: str) -> None:
    assert agents.DRIVERS[api](served.url, 1, 3) == 3


def test_sessions_at_once(served: Served) -> None:
    before = served.metric("vllm:spec_decode_num_accepted_tokens_total")
    with ThreadPoolExecutor(4) as pool:
        apis = [*agents.DRIVERS, "chat"]
        driven = [pool.submit(agents.DRIVERS[api], served.url, 10 + i, 2) for i, api in enumerate(apis)]
        assert [future.result() for future in driven] == [2] * 4
    assert served.metric("vllm:spec_decode_num_accepted_tokens_total") > before
