"""One state per sequence says and keeps, bit for bit, what a state per draft position does; whatever the schedule.

One process runs the engines of a fixture one after another. A schedule is the same for all of them, so that every
committed state can be compared: with vLLM's, and with a recurrence that runs beside the engine token by token.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.state import small
from tests.state.faults import FAULTS
from thor_spec.vllm_plugin import seam

pytestmark = pytest.mark.skipif(seam.has_gpu_build(), reason="not run: tests/state/test_gpu.py is for GPUs")
ROOT = Path(__file__).parent.parent.parent
DRAFTS = 5
# Drafts that nothing was trained for are accepted by chance, of every length.
CHANCE = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0}
ALL = {"drafts": DRAFTS, "cache_bytes": 16 << 20, "longest_prompt": 150, "longest_answer": 24, "speculation": CHANCE}
OFF = {"caching": False, "budget": 96, "seed": 1, "steps": 230, "longest_answer": 40}
ON = {"caching": True, "budget": 288, "seed": 2, "steps": 290}
Result = dict[str, Any]


def run(*cases: Result, timeout: float = 280) -> list[Result]:
    command = [sys.executable, "-m", "tests.state.drive", json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[Result] = json.loads(done.stdout.splitlines()[-1])
    return results


def case(pair: tuple[Path, Path], *parts: Result, **more: Any) -> Result:
    merged = {"target": str(pair[0]), "drafter": str(pair[1]), **ALL}
    for part in (*parts, more):
        merged |= part
    return merged


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return small.make(tmp_path_factory.mktemp("small"), 64)


@pytest.fixture(scope="module")
def both(pair: tuple[Path, Path]) -> list[tuple[Result, Result]]:
    """Snapshot and reconstruct, without and with prefix caching."""
    found = run(
        *(
            case(pair, mode, options={"state": state}, watched=state == "reconstruct")
            for mode in (OFF, ON)
            for state in ("snapshot", "reconstruct")
        )
    )
    return [(found[0], found[1]), (found[2], found[3])]


@pytest.mark.parametrize("what", ["tokens", "logprobs", "states"])
def test_the_same_bits_as_vllms_snapshots(both: list[tuple[Result, Result]], what: str) -> None:
    for theirs, ours in both:
        assert theirs["layers"] == "QwenGatedDeltaNetAttention"
        assert ours["layers"] == "ReconstructedGDN"
        assert ours[what] == theirs[what]
        assert len(ours["tokens"]) >= 50
        assert len(ours["states"]) > 5 * len(ours["tokens"])


def test_schedules_had_everything(both: list[tuple[Result, Result]]) -> None:
    """What the equality above and the checks inside the runs were about."""
    runs = [ours for _, ours in both]
    counts = sum((Counter(r["counts"]) for r in runs), Counter())
    checked = sum((Counter(r["checked"]) for r in runs), Counter())
    print(counts, checked, *(r["worst"] for r in runs))
    assert counts["steps"] >= 500
    assert min(counts["preemptions"], counts["aborts"]) >= 3
    for r in runs:
        assert {int(n) for n in r["drafts"]} == set(range(DRAFTS + 1))
        assert {int(n) for n in r["rows"]} >= set(range(1, 6))
        assert 0 < r["worst"]["decode"] < 1e-4
        assert r["watched"] > 1000
    assert any("8" in r["rows"] for r in runs)
    assert checked["restored, within a step"] > 0
    assert checked["saved, within a step"] > 5
    assert checked["saved, end of a step"] > 0
    assert checked["restored, prompt"] > 0
    assert checked["restored, end of a step"] > 0
    assert checked["states"] > 3000


def test_kernels_in_the_engine(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Interpreted: replay has the bits of vLLM's GPU path, and wy keeps to the recurrence."""
    one_layer = small.make(tmp_path, 64, layers=2)
    common = {**ON, "drafts": 3, "seed": 4}
    theirs, replay, wy = run(
        case(one_layer, common, options={"state": "snapshot"}, interpreted_snapshots=True, steps=14),
        case(one_layer, common, options={"gdn_kernel": "replay"}, watched=True, steps=14),
        case(one_layer, common, options={"gdn_kernel": "wy"}, watched=True, steps=6),
    )
    for what in ("tokens", "logprobs", "states"):
        assert replay[what] == theirs[what]
    assert len(replay["states"]) > 20
    assert wy["checked"]["states"] > 10


def test_mtp_chains(pair: tuple[Path, Path]) -> None:
    """The target's own head drafts: what drafts is nothing to a state."""
    chance = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    common = {**ON, "mtp": True, "drafts": 3, "speculation": chance, "steps": 40}
    theirs, ours = run(
        case(pair, common, options={"state": "snapshot"}),
        case(pair, common, options={"state": "reconstruct"}, watched=True),
    )
    assert ours["layers"] == "ReconstructedGDN"
    for what in ("tokens", "logprobs", "states"):
        assert ours[what] == theirs[what]
    assert {int(n) for n in ours["drafts"]} == set(range(4))
    assert len(ours["states"]) > 50


@pytest.mark.timeout(900)  # ranks wait for one another by spinning, which takes minutes where others need the cores
def test_two_ranks_answer_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each keeps the states of its heads. Snapshots of two ranks too: sums of two are not those of one."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else each rank wants a NUMA node of its own
    of_two = small.make(tmp_path, 64, layers=2, ranks=2)
    common = {"tp": 2, "eager": True, "caching": False, "seed": 7, "requests": 3, "longest_answer": 12}
    cases = (case(of_two, common, options={"state": state}) for state in ("snapshot", "reconstruct"))
    theirs, ours = run(*cases, timeout=880)
    assert ours["tokens"] == theirs["tokens"]
    assert ours["logprobs"] == theirs["logprobs"]
    assert ours["accepted"] > 0


@pytest.fixture(scope="module")
def alone(pair: tuple[Path, Path]) -> list[Result]:
    """What vLLM's snapshots cannot be compared with: prompts of one token, and faults."""
    one_token = case(pair, OFF, options={}, watched=True, steps=60, longest_prompt=1, shortest_prompt=1)
    return run(one_token, *(case(pair, ON, options={}, watched=True, fault=fault) for fault in FAULTS))


def test_prompts_of_one_token(alone: list[Result]) -> None:
    """vLLM pads them with placeholder drafts beside decodes, and its snapshots then keep the placeholders."""
    assert alone[0]["counts"]["requests"] > 12
    assert alone[0]["checked"]["states"] > 300


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(alone: list[Result], fault: str) -> None:
    assert alone[1 + FAULTS.index(fault)]["seen"]
