"""Benchmarks without a server: what they compare, what they refuse, and what they render."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from thor_spec import record
from thor_spec.bench import chat, dummy, meter, quality, report, serving, statistic, table, workload
from thor_spec.bench.arms import Arm, parse, undeclared
from thor_spec.bench.doctests import function_text, grade
from thor_spec.bench.facts import of_plan
from thor_spec.bench.load import Repetition, Timed, by_length, by_place
from thor_spec.bench.meter import Meter, Sample
from thor_spec.bench.turns import turns
from thor_spec.cli import starting
from thor_spec.cli.main import main
from thor_spec.config import resolve
from thor_spec.errors import ConfigError
from thor_spec.gates.verdict import Verdict
from thor_spec.serve.client import Answer, Forced
from thor_spec.serve.plan import make_plan
from thor_spec.vllm_plugin import seam

SHARED = {"temperature": 0.7, "batch": 2}


def test_arms_are_named_on_the_command_line() -> None:
    exact, typical = parse(["exact", "t:accept=typical,accept-eps=0.2,batch=8"], SHARED)
    assert (exact.name, exact.batch, exact.request) == ("exact", 2, {"temperature": 0.7})
    assert typical.batch == 8
    assert typical.request == {"temperature": 0.7, "thor_spec": {"accept": "typical", "accept_eps": 0.2}}
    assert exact.server == typical.server == "{}"
    assert [arm.name for arm in parse([], SHARED)] == ["default"]


def test_arms_take_what_profiles_take(tmp_path: Path) -> None:
    """Sizes, paths, lists and what YAML thinks a truth or a number; and arms that differ in them have two servers."""
    path = tmp_path / "arms.yaml"
    path.write_text(
        "a: {kv_cache_memory: 2GiB, tree: 15, vllm_args: [--seed, 3], environment: {OMP_NUM_THREADS: 1}}\n"
        "b: {rope_factors: f.json, tree: off}\n"
    )
    a, b = parse([str(path)], SHARED)
    path.with_name("off.yaml").write_text("off: {draft: none}\n7:\n")
    assert [arm.name for arm in parse([str(path.with_name("off.yaml"))], SHARED)] == ["off", "7"]
    line = parse(["a:kv_cache_memory=2GiB,tree=15", "b:tree=off"], SHARED)
    for arm in (a, line[0]):
        assert resolve({k: v for k, v in arm.declared.items()}).config.kv_cache_memory == 2 << 30
        assert arm.declared["tree"] == "15"
    assert (b.declared["tree"], line[1].declared["tree"], b.declared["rope_factors"]) == ("off", "off", Path("f.json"))
    assert (a.declared["vllm_args"], a.declared["environment"]) == (("--seed", "3"), {"OMP_NUM_THREADS": "1"})
    assert a.server != b.server
    with pytest.raises(ConfigError, match=r"Arm a: draft_tokens must be int, not str\."):
        parse(["a:draft_tokens=many"], SHARED)


def test_arms_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "arms.yaml"
    path.write_text("shared: {draft_tokens: 3}\nplain: {draft: none, draft_tokens: null}\nspec:\n")
    plain, spec = parse([str(path)], SHARED)
    assert (plain.drafts, spec.drafts) == (False, True)
    assert plain.server != spec.server
    assert spec.options["draft_tokens"] == 3


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (["a:nonsense=1"], "there is no option nonsense"),
        (["a:accept"], "not KEY=VALUE"),
        (["a", "a"], "two arms a"),
        (["a:batch=0"], "at least 1"),
        (["a:accept=loose"], "not one of exact"),
        (["missing.yaml"], "cannot be read"),
        (["a:port=1"], "there is no option port"),
    ],
)
def test_arms_that_cannot_be_are_refused(described: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(described, SHARED)


def test_undeclared_differences_are_found_between_arms_and_between_starts() -> None:
    arms = [Arm(name="a", declared={}, shared={}), Arm(name="b", declared={"draft": "none"}, shared={})]
    base = {"drafter": "1", "draft_tokens": 7, "code": "x", "vllm": "0.33"}
    other = {**base, "drafter": None, "draft_tokens": 0}
    assert undeclared(arms, {"a": [base, base], "b": [other]}) == []
    assert "b and a differ in vllm" in undeclared(arms, {"a": [base], "b": [{**other, "vllm": "0.32"}]})[0]
    assert "a changed code between" in undeclared(arms, {"a": [base, {**base, "code": "y"}], "b": [other]})[0]
    # Declared by one of them is declared; a fact that only one has is a difference.
    assert "differ in extra" in undeclared(arms, {"a": [base], "b": [{**other, "extra": 1}]})[0]


DECLARED: dict[str, Any] = {
    "model": "nano-llada",
    "draft": "none",
    "draft_tokens": 3,
    "max_request_bytes": 1 << 20,
    "context": 4096,
    "max_seqs": 4,
    "kv_cache_memory": 1 << 28,
    "state": "snapshot",
    "gdn_kernel": "replay",
    "drafter_window": 64,
    "rope": "yarn",
    "rope_factor": 2.0,
    "adaptive_drafts": True,
    "tree": "8",
    "acceptance_floor": 1.5,
    "memory_floor": 1 << 30,
    "environment": {"OMP_NUM_THREADS": "1"},
    "vllm_args": ("--enable-prefix-caching",),
}


@pytest.mark.parametrize("option", DECLARED)
def test_a_declared_option_explains_what_the_engine_is_asked_for(option: str) -> None:
    """Otherwise a comparison of two settings runs to its end, and is then not reported."""
    shared = {"model": "nano-hybrid", **({"rope": "linear", "rope_factor": 4.0} if option == "rope_factor" else {})}
    arms = [
        Arm(name="a", declared={}, shared=shared),
        Arm(name="b", declared={option: DECLARED[option]}, shared=shared),
    ]
    seen = {arm.name: [of_plan(make_plan(resolve(arm.options)))] for arm in arms}
    assert undeclared(arms, seen) == []
    assert undeclared([arms[0], replace(arms[1], declared={})], seen) or option in {"memory_floor", "acceptance_floor"}


def timed(**changes: Any) -> Timed:
    values = {"kind": "code", "tokens": 10, "prompt_tokens": 5, "ttft_s": 0.1, "tpot_s": 0.01, "rule": "exact"}
    return Timed(**{**values, **changes})


def repetition(seconds: float = 1.0, **changes: Any) -> Repetition:
    values: dict[str, Any] = {
        "seconds": seconds,
        "tokens": 100,
        "answers": (timed(), timed(ttft_s=0.3)),
        "drafts": 20.0,
        "accepted": 30.0,
        "accepted_by_place": (18.0, 12.0),
        "taken": 32.0,
        "relaxed": 8.0,
        "by_length": {},
        "joules": None,
        "degrees": None,
        "throttling": None,
    }
    return Repetition(**{**values, **changes})


def outcome(**changes: Any) -> chat.Outcome:
    arms = parse(["exact", "loose:accept=threshold,accept_eps=0.2"], SHARED)
    loose = (timed(rule="threshold eps=0.2"), timed(rule="threshold eps=0.2"))
    samples = {
        "exact": [repetition(1.0 + i / 10) for i in range(5)],
        "loose": [repetition((1.0 + i / 10) / 1.5, answers=loose, joules=50.0) for i in range(5)],
    }
    green = Verdict(gate="lossless", passed=True, summary="fine")
    facts = {"exact": [{"vllm": "1"}], "loose": [{"vllm": "1"}]}
    made = chat.Outcome(arms, samples, facts, {"exact": green, "loose": green}, {})
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_comparison_gives_medians_intervals_and_paired_ratios() -> None:
    found = outcome()
    assert found.refusals == []
    summary = found.as_dict()["summary"]
    assert summary["exact"]["tok_s"]["median"] == pytest.approx(100 / 1.2)
    assert summary["loose"]["tok_s"]["ratio"]["median"] == pytest.approx(1.5)
    assert summary["loose"]["tok_s"]["ratio"]["low95"] == pytest.approx(1.5)
    assert summary["exact"]["tau"]["median"] == 2.5
    # Of its own count: vLLM's leaves out drafts behind an answer's last token, and the share would pass one.
    assert summary["exact"]["relaxed_share"]["median"] == 0.25
    assert summary["exact"]["accepted_by_place"] == [0.9, 0.6]
    assert summary["exact"]["joules_per_token"] is None
    assert summary["loose"]["joules_per_token"]["median"] == 0.5


def test_steps_are_told_by_the_tokens_that_they_draft() -> None:
    metrics = """# TYPE thor_spec:draft_length_steps counter
thor_spec:draft_length_steps_total{draft_tokens="15",depth="0+"} 20
thor_spec:draft_length_steps_total{draft_tokens="15",depth="1024+"} 10
thor_spec:draft_length_steps_total{draft_tokens="0",depth="0+"} 10
# TYPE thor_spec:draft_length_tokens counter
thor_spec:draft_length_tokens_total{draft_tokens="15",depth="0+"} 60
thor_spec:draft_length_tokens_total{draft_tokens="15",depth="1024+"} 15
thor_spec:draft_length_tokens_total{draft_tokens="0",depth="0+"} 10
# TYPE thor_spec:draft_length_seconds counter
thor_spec:draft_length_seconds_total{draft_tokens="15",depth="0+"} 0.06
thor_spec:draft_length_seconds_total{draft_tokens="15",depth="1024+"} 0.03
thor_spec:draft_length_seconds_total{draft_tokens="0",depth="0+"} 0.02
"""
    found = by_length(metrics)
    assert found[15] == {"steps": 30, "tokens": 75, "seconds": pytest.approx(0.09)}
    told = outcome()
    told.repetitions["loose"] = [repetition(by_length=found) for _ in range(5)]
    summary = told.summary()
    assert summary["exact"]["by_length"] == {}
    assert summary["loose"]["by_length"][0] == {"share": 0.25, "tokens": 1, "ms": pytest.approx(2)}
    head, rows = table.chat(summary)
    told_of = [row[head.index("steps by drafts")] for row in rows]
    assert told_of == ["-", "0: 25%, 1.00 tokens in 2.00 ms; 15: 75%, 2.50 tokens in 3.00 ms"]


RED = Verdict(gate="lossless", passed=False, summary="3 wrong")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gates": {"exact": RED}}, "lossless gate of exact is red: 3 wrong"),
        ({"facts": {"exact": [{"vllm": "1"}], "loose": [{"vllm": "2"}]}}, "differ in vllm"),
    ],
)
def test_nothing_is_reported_when_there_is_a_reason(changes: dict[str, Any], why: str) -> None:
    content = outcome(**changes).as_dict()
    assert why in content["refused"][0]
    assert content["summary"] is None
    assert content["samples"]["exact"]  # kept, for whoever looks into it


def test_throttling_wrong_labels_and_other_prompts_are_reasons() -> None:
    made = outcome()
    made.repetitions["exact"][2] = repetition(throttling="the GPU's throttle alert was on")
    assert "throttled during exact" in made.refusals[0]
    made = outcome()
    made.repetitions["loose"][0] = repetition()
    assert "asked for threshold eps=0.2, and the server says exact, threshold" in made.refusals[0]
    made = outcome()
    made.repetitions["exact"][0] = repetition(answers=(timed(prompt_tokens=6), timed()))
    assert "not of the same length" in made.refusals[0]


def test_too_few_repetitions_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 5"):
        chat.run(parse([], SHARED), lambda arm: pytest.fail("started"), chat.Options(repetitions=4))


@pytest.mark.parametrize("kinds", ["foo", "code,foo", "code,", ""])
def test_kinds_that_there_are_none_of_start_nothing(monkeypatch: pytest.MonkeyPatch, kinds: str) -> None:
    monkeypatch.setattr("thor_spec.bench.chat.run", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chat", "--kinds", kinds])
    assert ended.value.code == 2


def test_arms_take_turns_and_servers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Place:
        def __init__(self, arm: Arm) -> None:
            self.arm = arm

        def visit(self, look: Any) -> Any:
            order.append(f"start {self.arm.name}")
            return look(self)

        context = 2048

    monkeypatch.setattr(chat.facts, "of_server", lambda server, plan: {})
    monkeypatch.setattr(chat, "repeat", lambda server, requests, batch, said: order.append(f"{batch}") or repetition())
    monkeypatch.setattr(chat.Lossless, "candidate", lambda self, server, options: None)
    monkeypatch.setattr(chat.Lossless, "verdict", lambda self, state, options: RED)
    arms = parse(["a:batch=1", "b:batch=2", "c:batch=3,draft=none"], {"temperature": 0})
    found = chat.run(arms, lambda arm: Place(arm), chat.Options(repetitions=5, per_start=2))  # type: ignore[arg-type,return-value]
    assert {name: len(each) for name, each in found.repetitions.items()} == {"a": 5, "b": 5, "c": 5}
    # Warm-ups 1 2 and 3, then two repetitions, the second backwards; the next round starts with the other server.
    assert " ".join(order[:15]) == "start a 1 2 1 2 2 1 start c 3 3 3 start c 3 3 3"
    assert set(found.gates) == {"a", "b"}
    random = chat.Options(repetitions=5, judged=False)
    one = chat.run(arms[:2], lambda arm: Place(arm), random)  # type: ignore[arg-type,return-value]
    assert len(one.facts["a"]) == 1
    assert not one.gates


def test_random_weights_are_those_of_every_arm_and_are_not_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pretended acceptance belongs to arms that draft, and to no other."""
    seen: dict[str, dict[str, Any]] = {}

    def run(arms: list[Arm], source: Any, options: chat.Options) -> Any:
        for arm in arms:
            source(arm)
            seen[arm.name] = flags.pop()
        assert not options.judged
        raise ConfigError("far enough")

    flags: list[dict[str, Any]] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(starting, "planned", lambda given, _profile: flags.append(given))
    monkeypatch.setattr(seam, "has_gpu_build", lambda: True)
    monkeypatch.setattr(chat, "run", run)
    dummies = ["bench", "chat", "--dummy", "small", "--synthetic-acceptance", "3"]
    with pytest.raises(SystemExit):
        main([*dummies, "--arms", "plain:draft=none", "--arms", "drafts:draft_tokens=7"])
    assert all(of["dummy_weights"] and of["model"].endswith("small/target") for of in seen.values())
    assert {name: of["synthetic_acceptance"] for name, of in seen.items()} == {"plain": None, "drafts": 3.0}


@pytest.mark.parametrize(
    "asked", [["--quality"], ["--arms", "a:model=nano-hybrid"], ["--arms", "a:url=http://localhost:1"], ["nano-hybrid"]]
)
def test_random_weights_take_the_place_of_every_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chat, "run", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as ended:
        main(["bench", "chat", "--dummy", "small", "--draft", "none", *asked])
    assert ended.value.code == 2


def test_intervals_hold_the_median_most_of_the_time() -> None:
    import random

    dice = random.Random(3)
    held = 0
    for i in range(60):
        found = statistic.median_interval([dice.gauss(10, 1) for _ in range(11)], seed=i)
        held += found["low95"] <= 10 <= found["high95"]
    assert held >= 0.85 * 60
    assert statistic.percentile([3, 1, 2], 0.5) == 2
    assert statistic.percentile([1, 2], 1.0) == 2


def test_the_workload_is_fixed_and_fits() -> None:
    first, again = (workload.requests(workload.KINDS, context=4096, tokens=64) for _ in range(2))
    assert first == again
    assert len({request.seed for request in first}) == len(first) >= 12
    assert {request.kind for request in first} == set(workload.KINDS)
    longest = max(len(request.body.get("prompt", "")) for request in first)
    assert 3500 < longest < 4096 - 64
    with pytest.raises(ConfigError, match="no prompts of kind 'poetry'"):
        workload.requests(("poetry",), context=100, tokens=1)


@pytest.mark.parametrize(
    ("body", "parses", "passes"),
    [
        ("    return a + b\n\nprint('more')", True, True),
        ("    return a - b\n", True, False),
        ("    return a +\n", False, False),
        ("\n\nother = 3\n", False, False),
        ("    while True:\n        pass\n", True, False),
        ("    with open('x', 'w') as f:\n        f.write('much')\n    return a + b\n", True, False),
    ],
)
def test_functions_are_graded(body: str, parses: bool, passes: bool) -> None:
    task = quality.tasks()[0]
    assert task["name"] == "add"
    assert grade(task["name"], task["head"], body) == (parses, passes)


def test_each_task_can_be_passed_and_only_by_a_body() -> None:
    solutions = {
        "add": "a + b", "double": "2 * n", "is_even": "n % 2 == 0", "first": "items[0]", "last": "items[-1]",
        "length": "len(text)", "reverse": "text[::-1]", "upper": "text.upper()", "join_words": "' '.join(words)",
        "total": "sum(values)", "largest": "max(values)", "strip": "text.strip()", "absolute": "abs(n)",
        "contains": "item in items", "square": "n * n", "split_lines": "text.split(chr(10))",
    }  # fmt: skip
    for task in quality.tasks():
        assert grade(task["name"], task["head"], f"    return {solutions[task['name']]}\n") == (True, True), task
        assert not grade(task["name"], task["head"], "").parses
    assert function_text("def f():\n", "    return 1\n\n\ndef g():\n    return 2\n") == "def f():\n    return 1\n"


def test_variety_counts_different_pieces() -> None:
    assert quality.distinct([[1, 1, 1, 1]], 1) == 0.25
    assert quality.distinct([[1, 2, 3], [1, 1, 1]], 2) == 0.75
    assert quality.distinct([[1]], 2) == 0.0


def test_quality_is_measured_over_all_tasks_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writing:
        """Answers ``add`` rightly with even seeds, and nothing that parses otherwise."""

        def drawn_all(self, asked: Any, *, at_once: int, **options: Any) -> list[Answer]:
            assert options["temperature"] == 0.7
            return [
                Answer(
                    prompt=(1,),
                    tokens=(1, 2, 1, 2),
                    text="    return a + b" if "def add" in head and seed % 2 == 0 else "    return (",
                    finish="length",
                    rule="",
                )
                for head, seed in asked
            ]

        def forced_all(self, answers: Any, *, at_once: int) -> Any:
            return [[Forced(token, self.logprob, ()) for token in answer.tokens] for answer in answers]

        logprob, url = -0.5, "u"

    two = quality.tasks()[:2]
    monkeypatch.setattr(quality, "tasks", lambda: two)
    found = quality.measure(Writing(), {"temperature": 0.7}, seeds=2)  # type: ignore[arg-type]
    assert (found.answers, found.parses, found.passes) == (4, 0.25, 0.25)
    assert found.perplexity == pytest.approx(2.71828**0.5, rel=1e-4)
    assert found.distinct == (0.5, pytest.approx(2 / 3), 1.0)
    Writing.logprob = 3.0
    with pytest.raises(ConfigError, match="tells logits where log-probabilities belong"):
        quality.measure(Writing(), {"temperature": 0.7}, seeds=2)  # type: ignore[arg-type]


def test_sensors_tell_power_and_heat(tmp_path: Path) -> None:
    device = tmp_path / "sys" / "class" / "hwmon" / "hwmon3"
    device.mkdir(parents=True)
    assert meter.sample(tmp_path).watts is None
    (device / "name").write_text("ina238\n")
    (device / "power1_input").write_text("52500000\n")
    with Meter(tmp_path) as taken:
        pass
    assert taken.samples[0].watts == 52.5
    assert taken.throttling is None
    taken.samples = [Sample(0, 10, False, 4, 50), Sample(2, 30, False, 4, 70), Sample(3, None, None, 6, None)]
    assert taken.joules == 40
    assert taken.throttling == "2 over-current events"
    assert taken.degrees == 70
    taken.samples = [Sample(0, None, True, None, None)]
    assert (taken.joules, taken.throttling) == (None, "the GPU's throttle alert was on")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("412.53 W, Not Active, Not Active, 45", (412.53, False, 45.0)),
        ("[N/A], Active, Not Active, 45", (None, True, 45.0)),
        ("1 W, [N/A], [N/A], [N/A]", (1.0, None, None)),
        ("", (None, None, None)),
        ("9 W, Not Active, Not Active, 45\n300 W, Active, Active, 90", (9.0, False, 45.0)),  # another one's heat
    ],
)
def test_what_nvidia_smi_says(row: str, told: object) -> None:
    names = (
        "power.draw [W], clocks_event_reasons.hw_slowdown, clocks_event_reasons.sw_thermal_slowdown, temperature.gpu"
    )
    assert meter.told_by_smi(f"{names}\n{row}\n") == told
    assert meter.told_by_smi("No devices were found") == (None, None, None)


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


def test_dummies_have_whole_vocabularies(tmp_path: Path) -> None:
    assert dummy.names() == ["qwen3.5-35b-a3b", "small"]
    target, drafter = dummy.make("small", tmp_path)
    config = json.loads((target / "config.json").read_text())
    content = json.loads((target / "tokenizer.json").read_text())
    ids = {*content["model"]["vocab"].values(), *(entry["id"] for entry in content["added_tokens"])}
    assert ids == set(range(config["vocab_size"]))
    assert (drafter / "model.safetensors").is_file()
    with pytest.raises(ConfigError, match="no dimensions of 'x'"):
        dummy.make("x", tmp_path)


def test_only_whole_names_of_folders_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(record._TREE) + "-home")
    told = f"{record._TREE}/a {record._TREE}-home/b {record._TREE}s/c"
    assert record.without_places(told) == f"./a ~/b {record._TREE}s/c"


@pytest.mark.parametrize("tree", ["/", "/usr/lib"])
def test_the_root_is_no_folder_of_anybody(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(record, "_TREE", Path(tree))
    assert record.without_places("http://127.0.0.1:8000/v1 /tmp/a") == "http://127.0.0.1:8000/v1 /tmp/a"


def test_records_are_written_once_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = record.write("bench-chat", {"home": str(Path.home() / "x"), "value": 3})
    assert path.parent.parent == Path("evidence")
    found = record.read(path)
    assert (found.name, found.content["value"], found.content["home"]) == ("bench-chat", 3, "~/x")
    assert found.content["provenance"]["argv"]
    with pytest.raises(ConfigError, match="is there already"):
        record.write("again", {}, folder=path.parent)
    with pytest.raises(ConfigError, match=r"holds no record\.json"):
        record.find(tmp_path / "nowhere")
    path.write_text(json.dumps({"schema": 99, "name": "x"}))
    with pytest.raises(ConfigError, match="of schema 99"):
        record.find(tmp_path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is not a record"):
        record.find(tmp_path)


class Strict(HTMLParser):
    """What a page refers to outside itself, and whether its tables are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.rows: list[int] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        assert tag not in ("script", "iframe", "link", "object"), tag
        for name in ("src", "href", "xlink:href"):
            (self.links if values.get(name, "#").startswith("#") else self.outside).append(values.get(name, "#"))
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "tr":
            self.rows.append(0)
        if tag in ("td", "th"):
            self.rows[-1] += 1


def written(folder: Path, name: str, content: dict[str, Any]) -> None:
    record.write(name, content, folder=folder / name)


@pytest.fixture
def records(tmp_path: Path) -> list[record.Record]:
    made = outcome()
    made.quality = {
        "exact": quality.Quality(answers=4, parses=0.5, passes=0.25, perplexity=3.1, distinct=(0.4, 0.8, 0.9))
    }
    written(tmp_path, "bench-chat", made.as_dict())
    point = {"output_throughput": 10.0, "median_tpot_ms": 3.0, "median_ttft_ms": 20.0, "completed": 4, "failed": 0}
    points = [{"concurrency": c, "request_rate": None, "result": point} for c in (1, 2)]
    written(tmp_path, "bench-serving", {"points": points, "refused": []})
    verdict = Verdict(gate="lossless", passed=False, summary="<b>3 wrong</b> & more")
    written(tmp_path, "verify-lossless", {"verdicts": [verdict.as_dict()]})
    written(tmp_path, "guard", {"seconds": 3.5})
    return record.find(tmp_path)


def test_the_page_is_well_formed_self_contained_and_complete(records: list[record.Record], tmp_path: Path) -> None:
    page = report.html(records)
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    space = {"h": "http://www.w3.org/1999/xhtml", "s": "http://www.w3.org/2000/svg"}
    assert len(root.findall(".//h:section", space)) == 4
    assert len(root.findall(".//s:svg", space)) == 3
    assert len(root.findall(".//h:table", space)) == 4
    strict = Strict()
    strict.feed(page)
    assert strict.outside == []
    assert len(strict.ids) == len(set(strict.ids))
    assert {link.removeprefix("#") for link in strict.links if link != "#"} <= set(strict.ids)
    text = "".join(root.itertext())
    assert "<b>3 wrong</b> & more" in text
    assert "median and 95 % interval" in text
    assert page == report.html(records)
    assert str(Path.home()) not in page


def test_a_refused_record_shows_why_and_no_figures(tmp_path: Path) -> None:
    written(tmp_path, "bench-chat", outcome(gates={"exact": RED}).as_dict())
    found = record.find(tmp_path)
    page = report.html(found)
    assert "lossless gate of exact is red" in page
    assert "<table" not in page
    assert "<svg" not in page
    assert "Not to be reported: the lossless gate of exact is red" in report.markdown(found)


def test_markdown_has_a_table_for_each_record(records: list[record.Record]) -> None:
    text = report.markdown(records)
    assert text.count("\n## ") + text.startswith("## ") == 4
    assert "0.25 / " not in text
    assert "25%" in text
    lines = [line for line in text.splitlines() if line.startswith("| exact")]
    assert lines[0].count("|") == len(table.chat(records_summary(records))[0]) + 1


def records_summary(records: list[record.Record]) -> dict[str, Any]:
    return next(r.content["summary"] for r in records if r.name == "bench-chat")


def test_sides_take_turns_backwards_every_other_time() -> None:
    assert list(turns(("a", "b"), 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert [side for _, side in turns({"a": 1, "b": 2}, 2)] == ["a", "b", "b", "a"]
