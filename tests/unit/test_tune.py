"""The tuner against a worker that hangs, dies, fails or is slow, and against what it left itself."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from thor_spec.capacity import shape
from thor_spec.errors import ConfigError, PlatformError
from thor_spec.tune.search import JOURNAL, Limits, Worker, search
from thor_spec.tune.space import TOKENS, Launch, Problem, launches

FILE = "E=4,N=8,device_name=Board.json"
PROBLEM = Problem(experts=4, chosen=2, hidden=16, intermediate=8)
WORKER = """
import json, sys, time
assert json.loads(sys.argv[-1])["experts"] == 4
greeting = sys.argv[1]
print("a library's notice")
print(greeting, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    n, m = asked["launch"]["BLOCK_SIZE_N"], asked["launch"]["BLOCK_SIZE_M"]
    if n == 1: time.sleep(60)                                      # hangs in its compiler
    if n == 2: sys.exit(3)
    if n == 3: print(json.dumps({"error": "OutOfResources"}), flush=True); continue
    if n == 7: print(json.dumps({"error": "illegal memory access", "last": True}), flush=True); time.sleep(60)
    print(json.dumps({"compiled": True}), flush=True)
    if n == 4: time.sleep(60)                                      # hangs on the device
    print(json.dumps({"us": 100.0 / n + m * asked["tokens"]}), flush=True)
"""
GREETING = json.dumps({"file": FILE, "capability": [11, 0]})


def some(tokens: int, capability: Sequence[int]) -> Iterator[Launch]:
    assert tuple(capability) == (11, 0)
    for n in (5, 1, 2, 3, 4, 7, 6):
        yield {"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": n}


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = make(tmp_path, GREETING)
    yield made
    made.close()


def make(folder: Path, greeting: str) -> Worker:
    script = folder / "worker.py"
    script.write_text(WORKER)
    limits = Limits(start_s=20.0, compile_s=1.0, measure_s=1.0)
    return Worker((sys.executable, str(script), greeting), PROBLEM, limits)


def test_what_hangs_dies_or_fails_costs_its_own_time_only(worker: Worker, tmp_path: Path) -> None:
    said: list[str] = []
    file = search(worker, [1, 2], some, tmp_path / "out", resume=False, say=said.append)
    assert file == tmp_path / "out" / FILE
    assert json.loads(file.read_text()) == {str(n): {"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": 6} for n in (1, 2)}
    lines = [json.loads(line) for line in (tmp_path / "out" / JOURNAL).read_text().splitlines()[1:]]
    problems = {line["launch"]["BLOCK_SIZE_N"]: line["problem"] for line in lines}
    silent, broken = "was silent for 1 s", "illegal memory access"  # after which the next one has a new process
    assert problems == {5: "", 1: silent, 2: "ended", 3: "OutOfResources", 4: silent, 7: broken, 6: ""}
    assert len(said) == 2
    assert "7 tried, 5 of them failed" in said[0]


def test_an_interrupted_search_goes_on_without_measuring_again(worker: Worker, tmp_path: Path) -> None:
    out = tmp_path / "out"
    search(
        worker, [1], lambda *_: [{"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": n} for n in (5, 1)], out, resume=False, say=print
    )
    with (out / JOURNAL).open("a") as file:
        file.write('{"tokens": 1, "laun')  # as a power cut leaves it
    before = (out / JOURNAL).read_text()
    more = [{"BLOCK_SIZE_M": 1, "BLOCK_SIZE_N": n} for n in (1, 5, 6)]
    search(worker, [1], lambda *_: more, out, resume=True, say=print)
    added = (out / JOURNAL).read_text().removeprefix(before + "\n").splitlines()
    assert [json.loads(line)["launch"]["BLOCK_SIZE_N"] for line in added] == [6]


def test_a_journal_is_not_mixed_with_another(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text(json.dumps({"file": "E=9.json"}) + "\n")
    with pytest.raises(ConfigError, match="--resume"):
        search(worker, [1], some, tmp_path, resume=False, say=print)
    with pytest.raises(ConfigError, match=r"is about E=9\.json"):
        search(worker, [1], some, tmp_path, resume=True, say=print)


@pytest.mark.parametrize("greeting", ['{"error": "there is no CUDA device"}', "no greeting"])
def test_where_nothing_can_be_measured_it_is_said(tmp_path: Path, greeting: str) -> None:
    worker = make(tmp_path, greeting)
    worker._limits = Limits(start_s=3.0)
    with pytest.raises(PlatformError, match=r"no CUDA device|was silent"):
        search(worker, [1], some, tmp_path, resume=False, say=print)
    worker.close()


@pytest.mark.parametrize("tokens", TOKENS)
def test_thor_gets_what_fits_it_and_every_batch_something(tokens: int) -> None:
    thor, other = list(launches(tokens, (11, 0))), list(launches(tokens, (9, 0)))
    assert 0 < len(thor) < len(other)
    assert max(launch["num_stages"] for launch in thor) <= 3
    assert max(launch["num_warps"] for launch in thor) <= 4
    assert len({tuple(launch.items()) for launch in other}) == len(other)
    assert max(launch["BLOCK_SIZE_M"] for launch in other) <= max(16, 2 * tokens)


def test_a_problem_is_what_one_device_has() -> None:
    config = {"num_experts": 256, "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 512}
    assert Problem.of(config, 2) == Problem(experts=256, chosen=8, hidden=2048, intermediate=256)
    with pytest.raises(ConfigError, match="no experts"):
        Problem.of({"hidden_size": 4})
    with pytest.raises(ConfigError, match="quantized"):
        Problem.of({**config, "quantization_config": {}} | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(ConfigError, match="cannot be shared by 3"):
        Problem.of(config, 3)


@pytest.mark.parametrize("name", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_experts_are_counted_under_every_name_and_none_is_taken_for_dense(name: str) -> None:
    config = {name: 64, "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 512}
    assert Problem.of(config).experts == shape.count_experts(config) == 64
    assert shape.count_experts({"hidden_size": 2048}) == 0
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, name: 8,
               "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    with pytest.raises(ConfigError, match=r"8 experts.*how large they are"):
        shape.ModelShape.parse("mixtral", mixtral)
