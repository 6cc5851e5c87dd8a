"""Draft trees in vLLM's runner: the tokens of no speculation, and the six invariants in every layer.

A model in float32 and prompts decoded in torch, so that equality is a fair question; drafts come from an oracle that
puts the right token at some rank, so that every accepted length and every branch occurs. One process runs the engines
of a fixture one after another.
"""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.state import small
from thor_spec.gates.tree import FAULTS, INVARIANTS
from thor_spec.nano import target
from thor_spec.nano.corpus import TEXT
from thor_spec.vllm_plugin import interpreter, seam

pytestmark = [
    pytest.mark.skipif(seam.has_gpu_build(), reason="not run: benchmarks/tree.py is for GPUs"),
    pytest.mark.timeout(1200),
]
ROOT = Path(__file__).parent.parent.parent
TOKENS = list(TEXT.encode())
ANSWER = 16
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 3, "logprobs": 2},
    {"logprobs": 2},
    {"temperature": 0.7, "top_k": 20, "seed": 4},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.0, "top_p": 0.9, "seed": 9},
    {"extra_args": {"thor_spec_tree": "chain"}},
)
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-f]{3,9}x[ -~]*", "temperature": 0.8, "seed": 2},
    {"regex": "[ -~]*"},
)
RELAXED = {"temperature": 1.0, "seed": 5, "extra_args": {"thor_spec_accept": "threshold", "thor_spec_eps": 1e-3}}
Result = dict[str, Any]


def drive(*cases: Result) -> list[Result]:
    command = [sys.executable, "-m", "tests.tree.drive", json.dumps(cases)]
    env = {**os.environ, **interpreter.environment(os.environ.get("PYTHONPATH", ""))}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[Result] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return small.make(tmp_path_factory.mktemp("small"), 64)


@pytest.fixture(scope="module")
def questions(pair: tuple[Path, Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Requests of all samplings, and the greedy answers that transformers' own model gives."""
    rng, model = random.Random(1), target.load(pair[0])
    requests, truth = {}, {}
    for i, sampling in enumerate(SAMPLINGS):
        prompt = TOKENS[rng.randrange(1000) :][: (1, 3, 17, 40, 90, 7, 30)[i]]
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(ANSWER):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        requests[f"r{i}"] = {"prompt": prompt, "params": {"max_tokens": ANSWER, **sampling}}
        truth[f"r{i}"] = [prompt, ids[len(prompt) :]]
    return requests, truth


def case(pair: tuple[Path, Path], asked: tuple[dict[str, Any], dict[str, Any]], tree: str, **more: Any) -> Result:
    common = {"target": str(pair[0]), "drafter": str(pair[1]), "requests": asked[0], "truth": asked[1]}
    options = {"tree": tree, **more.pop("options", {})}
    return {**common, "options": options, "rounds": [{"cut": 0}, {}], **more}


@pytest.fixture(scope="module")
def runs(pair: tuple[Path, Path], questions: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """Each engine answers without drafts first, then with trees; whole, cut at random, and preempted."""
    rounds = [{"cut": 0}, {"cut": -1}, {"preempt": True}]
    long = {
        name: {**request, "prompt": (TOKENS * 2)[i * 50 :][:300]}
        for i, (name, request) in enumerate(questions[0].items())
    }
    greedy = {name: questions[0][name] for name in ("r0", "r2", "r6")}
    few = {
        f"f{name}": {"prompt": r["prompt"], "params": {**r["params"], "logprobs": None, "max_tokens": 8}}
        for name, r in greedy.items()
    }
    truth = {**questions[1], **{f"f{name}": questions[1][name] for name in greedy}}
    broken = {"faults": list(FAULTS), "faulty_requests": few}
    more = {
        f"g{i}": {"prompt": few["fr2"]["prompt"], "params": {"max_tokens": ANSWER, **grammar}}
        for i, grammar in enumerate(GRAMMARS)
    }
    relaxed = {"x0": {"prompt": few["fr0"]["prompt"], "params": {"max_tokens": 30, **RELAXED}}}
    one_layer = small.make(tmp_path_factory.mktemp("one-layer"), 64, layers=2)
    short = {name: {**questions[0][name], "params": {"max_tokens": 5}} for name in ("r0", "r1")}
    interpreted = {"dtype": "bfloat16", "watched": True, "rounds": [{}], "drafts": 5}
    auto = {"drafts": 12, "rounds": [{"cut": 0}, {}, {}], "fitted": True}
    return drive(
        case(pair, (questions[0], truth), "9,4", drafts=9, rounds=rounds, watched=True, **broken),
        case(pair, questions, "3x2x1", drafts=15),
        case(pair, (long, questions[1]), "7,3", drafts=7, caching=True, budget=288, rounds=[*rounds[:2], {}]),
        case(pair, (greedy, questions[1]), "1x1x1x1", drafts=4),
        case(pair, (greedy, questions[1]), "off", drafts=4, options={"gdn_kernel": "torch"}),
        case(pair, ({**questions[0], **more, **relaxed}, questions[1]), "auto,12", **auto),
        *(
            case(one_layer, (short, questions[1]), "5,2", options={"gdn_kernel": kernel}, **interpreted)
            for kernel in ("replay", "wy")
        ),
    )


def test_tokens_are_those_of_no_speculation(runs: list[Result]) -> None:
    """Greedy and drawn ones, with penalties and grammars and without; seeds draw the same noise either way."""
    for run in (*runs[:4], runs[5]):
        plain, *drafted = run["rounds"]
        assert plain["accepted"] == 0
        for answers in drafted:
            assert exact(answers) == exact(plain)
            assert answers["accepted"] > 5


def exact(answers: Result) -> Result:
    return {name: tokens for name, tokens in answers["tokens"].items() if name != "x0"}


def test_a_relaxed_request_takes_what_is_likely(runs: list[Result]) -> None:
    """Its answers are not those without drafts, and its neighbours do not notice."""
    plain, *drafted = (answers["tokens"]["x0"] for answers in runs[5]["rounds"])
    assert any(tokens != plain for tokens in drafted)
    drafts, accepted, relaxed, _ = runs[5]["relaxed"][1]
    assert drafts > accepted >= relaxed > 3


def test_grammars_are_kept(runs: list[Result]) -> None:
    for answers in runs[5]["rounds"]:
        assert re.fullmatch(r"[a-f]{3,9}x[ -~]*", bytes(answers["tokens"]["g0"]).decode())
        assert all(0x20 <= token <= 0x7E for token in answers["tokens"]["g1"])


def test_auto_verifies_what_pays(runs: list[Result]) -> None:
    """Several sizes, none between them; every step is timed, in every phase."""
    trees, chains = runs[5]["budgets"]
    steps = [a + b for a, b in zip(trees, chains, strict=True)]
    chosen = [nodes for nodes, count in enumerate(steps) if count]
    assert set(chosen) <= {1, 2, 4, 6, 7, 8, 12}
    for run in (runs[0], runs[5]):
        *phases, timed = run["phases"]
        assert all(nanoseconds > 0 for nanoseconds in phases)
        assert timed > 20
    nodes = runs[5]["counted"][0]
    assert sum(n * count for n, count in enumerate(nodes)) < sum(r["drafted"] for r in runs[5]["rounds"])


def test_greedy_tokens_are_those_of_transformers(runs: list[Result], questions: Any) -> None:
    for run in (*runs[:2], *runs[3:5]):
        for answers in run["rounds"]:
            for name in ("r0", "r2", "r6"):
                assert answers["tokens"][name] == questions[1][name][1]


def test_logprobs_belong_to_the_tokens(runs: list[Result]) -> None:
    for run in runs[:2]:
        plain, *drafted = (answers["logprobs"] for answers in run["rounds"])
        for answers in drafted:
            for name in ("r1", "r2"):
                ours, theirs = flat(answers[name]), flat(plain[name])
                assert [token for token, _ in ours] == [token for token, _ in theirs]
                assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], abs=1e-4)


def flat(places: list[list[Any]]) -> list[Any]:
    return [tuple(entry) for place in places for entry in place]


def test_preemptions_and_prefix_hits(runs: list[Result]) -> None:
    assert runs[0]["rounds"][2]["preempted"] > 2
    assert runs[2]["rounds"][2]["hits"] > 3


def test_width_1_is_a_chain(runs: list[Result]) -> None:
    """I6: the same states, bit for bit, as without trees."""
    tree, chain = runs[3], runs[4]
    for ours, theirs in zip(tree["rounds"], chain["rounds"], strict=True):
        for what in ("tokens", "steps", "drafted", "accepted"):  # attention is not the same code on a CPU: no logprobs
            assert ours[what] == theirs[what]
    assert tree["states"] == chain["states"]
    assert len(tree["states"]) > 40


def test_trees_are_counted(runs: list[Result]) -> None:
    for run in runs[:4]:
        nodes, depth, accepted = run["counted"]
        total = {name: sum(answers[name] for answers in run["rounds"]) for name in ("drafted", "accepted")}
        assert sum(n * count for n, count in enumerate(nodes)) == total["drafted"]
        assert sum(n * count for n, count in enumerate(accepted)) == total["accepted"]
        assert sum(nodes) == sum(depth) == sum(accepted)
    assert sum(runs[1]["counted"][1][4:]) == 0  # a tree of three levels is three deep
    assert runs[1]["counted"][1][3] > 10


def test_dummy_runs_have_positions(runs: list[Result]) -> None:
    """Whatever trees their slots held: a table of angles is read there, and nothing lies before its first row."""
    for run in runs:
        if "dummy_positions" in run:
            low, high = run["dummy_positions"]
            assert low == 0
            assert high < 512
    assert sum("dummy_positions" in run for run in runs) > 3


def test_invariants_hold(runs: list[Result]) -> None:
    run = runs[0]
    print(run["checked"], run["rows"])
    assert not run["violated"], run["told"]
    assert all(run["checked"][name] > 40 for name in INVARIANTS)
    assert run["rows"]["tree"] > 60
    assert run["rows"]["accepted"] > 50


@pytest.mark.parametrize("variant", [6, 7], ids=["replay", "wy"])
def test_kernels_in_the_engine(runs: list[Result], variant: int) -> None:
    """Interpreted, in bfloat16: conv_tree, gdn_verify and the commits by path keep to the definition."""
    run = runs[variant]
    assert not run["violated"], run["told"]
    assert run["rows"]["tree"] > 3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_violation_is_seen(runs: list[Result], fault: str) -> None:
    violated = runs[0]["faults"][fault]
    assert violated.get(FAULTS[fault], 0) > 0, violated
