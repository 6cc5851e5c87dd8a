"""What a server is asked, and what its answers and counters say."""

from pathlib import Path

import pytest

from thor_spec.bench import serving, workload
from thor_spec.bench.load import by_place
from thor_spec.errors import ConfigError


def test_the_workload_is_fixed_and_fits() -> None:
    first, again = (workload.requests(workload.KINDS, context=4096, tokens=64) for _ in range(2))
    assert first == again
    assert len({request.seed for request in first}) == len(first) >= 12
    assert {request.kind for request in first} == set(workload.KINDS)
    longest = max(len(request.body.get("prompt", "")) for request in first)
    assert 3500 < longest < 4096 - 64
    with pytest.raises(ConfigError, match="no prompts of kind 'poetry'"):
        workload.requests(("poetry",), context=100, tokens=1)


def test_acceptance_is_read_by_place() -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    text = f"# TYPE {name} counter\n" + "".join(
        f'{name}_total{{engine="{e}",position="{i}"}} {10 * (i + 1)}\n' for e in (0, 1) for i in (0, 1)
    )
    assert by_place(text) == {0: 20.0, 1: 40.0}


def test_the_load_generator_is_told_what_to_do(tmp_path: Path) -> None:
    load = serving.Load(concurrency=4, prompts=2)
    argv = load.argv("http://x", "m", "t", tmp_path / "r.json")
    assert argv[argv.index("--max-concurrency") + 1] == "4"
    assert argv[argv.index("--request-rate") + 1] == "inf"
    assert "--max-concurrency" not in serving.Load(request_rate=2.0).argv("u", "m", "t", tmp_path / "r.json")
    point = serving.Point(concurrency=4, request_rate=None, result={"failed": 1}, joules=None, throttling="hot")
    assert [reason.split()[0] for reason in serving.refusals([point])] == ["the", "1"]
