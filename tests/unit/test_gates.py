"""Gates without a server: what they make of answers, and that their statistics are what they say."""

import math
import random

import pytest

from thor_spec.config import CONTROLS
from thor_spec.errors import ConfigError
from thor_spec.gates import controls, distribution, lossless, prompts, registry
from thor_spec.gates.gate import Options
from thor_spec.gates.judging import Subject, judge
from thor_spec.gates.ties import tie_bound
from thor_spec.gates.verdict import Verdict
from thor_spec.serve.client import Answer, Forced


def answer(*tokens: int) -> Answer:
    return Answer(prompt=(1, 2), tokens=tokens, text="abc", finish="length", rule="exact")


def step(gap: float) -> Forced:
    """The drawn token 7 lies ``gap`` below the likeliest."""
    return Forced(7, -1.0 - gap, ((7 if gap == 0 else 9, -1.0),))


def test_the_first_difference() -> None:
    assert lossless.first_difference([1, 2, 3], [1, 2, 3]) == 3
    assert lossless.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert lossless.first_difference([1, 2], [1, 2, 3]) == 2


def test_an_audit_tells_ties_from_errors_by_the_gap_alone() -> None:
    found = lossless.audit("p", [step(0), step(0.05), step(0.1), step(2.0)], lambda _: 0.06)
    assert (found.tokens, len(found.ties), len(found.wrong)) == (4, 1, 2)
    assert "token 3: 7 lies 2.0000 below 9" in found.wrong[1]


def test_the_bound_of_a_tie_grows_with_depth_and_spread() -> None:
    assert tie_bound(2.0, 4) == pytest.approx(4 * 2 * 2**-9 * math.sqrt(40) * 2.0)
    assert tie_bound(2.0, 16) == pytest.approx(2 * tie_bound(2.0, 4))


def green(**changes: object) -> Verdict:
    options = {
        "candidate": [answer(1, 2, 3, 4)] * 5,
        "audits": [lossless.Audit(tokens=4, ties=(), wrong=())] * 5,
        "accepted": 3.0,
        "references": {"plain": [answer(1, 2, 3, 4)] * 5},
        **changes,
    }
    return lossless.compare(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"audits": [lossless.Audit(tokens=4, ties=(), wrong=("x",))] * 5}, "wrong: x"),
        ({"audits": [lossless.Audit(tokens=4, ties=("t",), wrong=())] * 5}, "too many for ties"),
        ({"accepted": 0.0}, "nothing was tested"),
        ({"references": {"plain": [answer(1, 9, 3, 4)] * 5}}, "only 5 of 20 tokens equal plain"),
        ({"references": {"stock": [answer(1, 2, 3)] * 5}}, "another length than stock"),
    ],
)
def test_a_verdict_is_red_for_each_reason(changes: dict[str, object], why: str) -> None:
    assert green().passed
    found = green(**changes)
    assert not found.passed
    assert any(why in finding for finding in found.findings)
    assert found.as_text().startswith("FAIL")


def test_a_few_ties_are_green_and_listed() -> None:
    audits = [lossless.Audit(tokens=4, ties=("near",), wrong=()), *[lossless.Audit(tokens=4, ties=(), wrong=())] * 4]
    found = green(audits=audits)
    assert found.passed
    assert found.findings == ("tie: near",)


@pytest.mark.parametrize(("statistic", "degrees", "tail"), [(3.8415, 1, 0.05), (18.307, 10, 0.05), (27.877, 9, 0.001)])
def test_tails_are_those_of_the_tables(statistic: float, degrees: int, tail: float) -> None:
    assert distribution.upper_tail(statistic, degrees) == pytest.approx(tail, rel=1e-3)


def drawn(dice: random.Random, places: int, bias: float = 0.0) -> list[tuple[int, list[float]]]:
    """Ranks from laws that differ from place to place; with ``bias``, the likeliest is taken for sure so often."""
    found = []
    for _ in range(places):
        weights = sorted((dice.expovariate(1) ** 3 for _ in range(distribution.TOP_K)), reverse=True)
        masses = [weight / sum(weights) for weight in weights]
        rank = 0 if dice.random() < bias else dice.choices(range(len(masses)), masses)[0]
        found.append((rank, masses))
    return found


def test_p_values_are_uniform_when_the_law_is_right() -> None:
    dice = random.Random(5)
    p = []
    for _ in range(150):
        statistic, degrees, observed, expected = distribution.chi_square(drawn(dice, 400))
        assert sum(observed) == pytest.approx(sum(expected))
        p.append(distribution.upper_tail(statistic, degrees))
    assert 0.01 <= sum(value < 0.05 for value in p) / len(p) <= 0.10
    assert 0.42 <= sum(p) / len(p) <= 0.58


@pytest.mark.parametrize("bias", [0.2, 0.4])
def test_a_rule_that_prefers_the_likeliest_is_seen(bias: float) -> None:
    statistic, degrees, *_ = distribution.chi_square(drawn(random.Random(1), 3000, bias))
    assert distribution.upper_tail(statistic, degrees) < distribution.ALPHA


def test_the_law_of_a_step_follows_temperature_and_top_k() -> None:
    top = tuple((100 + i, -0.5 * i) for i in range(distribution.TOP_K))
    rank, masses = distribution.law(Forced(103, -1.5, top), 0.5)
    assert rank == 3
    assert masses[1] / masses[0] == pytest.approx(math.exp(-1.0))
    assert sum(masses) == pytest.approx(1)
    assert distribution.law(Forced(7, -30.0, (*top, (7, -30.0))), 1.0)[0] is None


class Scripted:
    """A gate that notes what it is asked for."""

    name = "scripted"
    wants_references = True

    def candidate(self, server: object, options: Options) -> list[str]:
        return [f"candidate {server} {options.references}"]

    def reference(self, name: str, server: object, state: list[str], options: Options) -> None:
        state.append(f"{name} {server}")

    def verdict(self, state: list[str], options: Options) -> Verdict:
        return Verdict(gate=self.name, passed=True, summary="; ".join(state))


class Standing:
    """A server that is there."""

    def __init__(self, name: str, speculates: bool = True) -> None:
        self.name = self.url = name
        self.speculates = speculates

    def __repr__(self) -> str:
        return self.name

    def metrics(self) -> str:
        return "vllm:spec_decode_num_drafts_total 1" if self.speculates else ""

    def visit(self, look: object) -> object:
        return look(self)  # type: ignore[operator]


def test_servers_are_visited_one_after_the_other_and_only_when_wanted() -> None:
    subject = Subject(candidate=Standing("c"), references={"plain": Standing("p"), "stock": Standing("s")})  # type: ignore[arg-type]
    (found,) = judge([Scripted()], subject, Options())
    assert found.summary == "candidate c ('plain', 'stock'); plain p; stock s"
    alone = Scripted()
    alone.wants_references = False
    assert judge([alone], subject, Options())[0].summary == "candidate c ()"


def test_a_server_without_speculation_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not speculate"):
        judge([Scripted()], Subject(candidate=Standing("c", speculates=False), references={}), Options())  # type: ignore[arg-type]


def test_the_registry_knows_every_gate() -> None:
    assert list(registry.GATES) == ["lossless", "distribution", "controls", "prefix-cache"]
    with pytest.raises(ConfigError, match="There is no gate x"):
        registry.named(("lossless", "x"))
    assert len(prompts.read()) == prompts.COUNT == len(set(prompts.read()))


def test_the_controls_gate_is_red_when_a_corruption_is_missed() -> None:
    caught = controls.Caught("kv-rows", "lossless", green(accepted=0.0))
    missed = controls.Caught("position", "lossless", green())
    gate = controls.Controls()
    assert gate.verdict((caught,), Options()).passed
    found = gate.verdict((caught, missed), Options())
    assert not found.passed
    assert "does not see position" in found.findings[0]
    assert not gate.verdict((), Options()).passed


def test_at_least_six_corruptions_are_seen_by_the_greedy_gate() -> None:
    assert len([kind for kind in CONTROLS if kind not in controls._SAMPLED]) >= 6
