"""Rules of acceptance: their checks, their limits, and the law of what they emit."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thor_spec.dflash.acceptance import Acceptance, accept
from thor_spec.errors import ConfigError

VOCABULARY = 6
EXACT = Acceptance()
probabilities = st.lists(st.floats(0, 1), min_size=VOCABULARY, max_size=VOCABULARY).filter(lambda p: sum(p) > 0.01)
tokens = st.integers(0, VOCABULARY - 1)


def rows(count: int) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(probabilities, min_size=count, max_size=count).map(
        lambda lists: torch.tensor(lists, dtype=torch.float64) / torch.tensor(lists, dtype=torch.float64).sum(1, True)
    )


steps = st.integers(0, 5).flatmap(
    lambda k: st.tuples(
        rows(k + 1), st.lists(tokens, min_size=k, max_size=k), st.lists(tokens, min_size=k + 1, max_size=k + 1)
    )
)
relaxed = st.builds(
    lambda rule, eps, delta: Acceptance(rule=rule, eps=eps, delta=delta),
    st.sampled_from(["threshold", "typical"]),
    st.floats(0.001, 1),
    st.floats(0.001, 1),
)


@given(steps, relaxed)
def test_relaxed_takes_what_exact_takes_and_more(step: Any, rule: Acceptance) -> None:
    p, drafts, y = step
    exact, more = accept(p, drafts, y, EXACT), accept(p, drafts, y, rule)
    assert len(more) >= len(exact)
    assert more[: len(exact) - 1] == exact[:-1]
    assert more[:-1] == drafts[: len(more) - 1]
    assert more[-1] == y[len(more) - 1]


@given(steps, st.floats(0.001, 1), st.floats(0.001, 1))
def test_typical_takes_what_threshold_takes(step: Any, eps: float, delta: float) -> None:
    fixed, falling = (accept(*step, Acceptance(rule=rule, eps=eps, delta=delta)) for rule in ("threshold", "typical"))
    assert len(falling) >= len(fixed)


@given(steps)
def test_without_a_threshold_all_rules_are_exact(step: Any) -> None:
    for off in (
        Acceptance(rule="threshold", eps=0),
        Acceptance(rule="typical", eps=-1),
        Acceptance(rule="typical", delta=0),
    ):
        assert off.is_exact
        assert off.numbers == (0, 0)
        assert accept(*step, off) == accept(*step, EXACT)


@given(steps)
def test_a_vanishing_threshold_takes_whatever_is_possible(step: Any) -> None:
    p, drafts, y = step
    took = accept(p, drafts, y, Acceptance(rule="threshold", eps=1e-300))
    for place, (row, draft, own) in enumerate(zip(p, drafts, y, strict=False)):
        if row[draft] == 0 and draft != own:
            assert len(took) == place + 1
            return
        if row[draft] < 1e-300 and draft != own:
            return
    assert len(took) == len(drafts) + 1


def test_the_emitted_law_is_a_certain_draft_or_the_targets_own() -> None:
    """With y ~ p: where p(d) passes, d alone; else p itself, exactly as without drafts."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
    rule = Acceptance(rule="threshold", eps=0.25)
    for draft in range(3):
        law = torch.zeros(3, dtype=torch.float64)
        for own in range(3):
            law[accept(p, [draft], [own, 0], rule)[0]] += p[0, own]
        want = torch.eye(3, dtype=torch.float64)[draft] if p[0, draft] >= 0.25 else p[0]
        assert torch.allclose(law, want)


def test_typical_falls_with_the_entropy() -> None:
    rule = Acceptance(rule="typical", eps=0.5, delta=0.4)
    sure, unsure = torch.tensor([[0.6, 0.4]]), torch.full((1, 4), 0.25)
    # 0.4 exp(-0.673) = 0.204; 0.4 / 4 = 0.1
    assert accept(sure.double().repeat(2, 1), [1], [0, 0], rule) == [1, 0]
    assert accept(unsure.double().repeat(2, 1), [3], [0, 0], rule) == [3, 0]
    assert accept(torch.tensor([[0.81, 0.19]]).double().repeat(2, 1), [1], [0, 0], rule) == [0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"accept": "loose"}, "accept='loose' is not one of exact, threshold, typical"),
        ({"accept_eps": 2}, "accept_eps=2 must be a number of at most 1"),
        ({"accept_eps": "0.1"}, "accept_eps='0.1'"),
        ({"accept_delta": math.inf}, "accept_delta=inf"),
        ({"accept_delta": True}, "accept_delta=True"),
        ({"epsilon": 0.1}, "thor_spec has no option epsilon. Known: accept, accept_eps, accept_delta"),
    ],
)
def test_a_request_that_is_wrong_is_told_what(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EXACT.of_request(wrong)


def test_a_request_overrides_the_servers_rule() -> None:
    server = Acceptance(rule="typical", eps=0.1, delta=0.2)
    assert server.of_request({}) == server
    assert server.of_request({"accept": "exact"}).is_exact
    assert server.of_request({"accept_eps": 0.3}) == Acceptance(rule="typical", eps=0.3, delta=0.2)
    assert server.of_request({"accept": "threshold"}).numbers == (0.1, math.inf)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (Acceptance(), "exact"),
        (Acceptance(rule="typical", eps=0), "exact"),
        (Acceptance(rule="threshold", eps=0.25), "threshold eps=0.25"),
        (Acceptance(rule="typical"), "typical eps=0.09 delta=0.3"),
    ],
)
def test_a_rule_in_words(rule: Acceptance, says: str) -> None:
    assert rule.described == says
