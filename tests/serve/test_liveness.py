"""The liveness rules, with a clock that the test turns."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thor_spec.serve.activity import Activity
from thor_spec.serve.liveness import Health, Liveness, Scrape, Verdict

IDLE = Scrape(iterations=10, running=0, waiting=0, kv_usage=0.0, drafted=0, accepted=0)
FLAT = Activity(available_bytes=1 << 36)
Look = tuple[Scrape | None, Activity]


def looks(
    look: Callable[[float], Look], *, seconds: float = 1500, every_s: float = 10.0, liveness: Liveness | None = None
) -> Iterator[tuple[float, Verdict]]:
    liveness = liveness or Liveness(0.0)
    now = 0.0
    while now <= seconds:
        yield now, liveness.scraped(*look(now), now)
        now += every_s


def first(health: Health, look: Callable[[float], Look]) -> tuple[float, Verdict] | None:
    return next(((at, verdict) for at, verdict in looks(look) if verdict.health is health), None)


def test_row17_rule_1_running_without_an_iteration_stalls_after_two_minutes() -> None:
    found = first(Health.STALLED, lambda now: (IDLE._replace(running=2), FLAT))
    assert found
    assert found[0] == 120
    assert "2 requests run and no iteration has ended for 120 s" in found[1].reason


def test_rule_1_counts_from_the_last_iteration() -> None:
    def look(now: float) -> Look:
        return IDLE._replace(running=1, iterations=min(now, 300)), FLAT

    found = first(Health.STALLED, look)
    assert found
    assert found[0] == 420


def test_rule_1_compilers_excuse_for_ten_minutes() -> None:
    found = first(Health.STALLED, lambda now: (IDLE._replace(running=1), FLAT._replace(compilers=True)))
    assert found
    assert found[0] == 600
    gone = first(Health.STALLED, lambda now: (IDLE._replace(running=1), FLAT._replace(compilers=now < 200)))
    assert gone
    assert 300 < gone[0] <= 320


def test_rule_1_idle_time_does_not_count() -> None:
    def look(now: float) -> Look:
        return IDLE._replace(running=0 if now < 290 else 1), FLAT

    found = first(Health.STALLED, look)
    assert found
    assert found[0] == 400  # the last idle look was at 280


def test_rule_1_goes_on_through_failed_scrapes() -> None:
    found = first(Health.STALLED, lambda now: (None if now in (50, 60) else IDLE._replace(running=1), FLAT))
    assert found
    assert found[0] == 120


def test_rule_2_waiting_requests_that_are_never_scheduled() -> None:
    found = first(Health.STALLED, lambda now: (IDLE._replace(waiting=3), FLAT))
    assert found
    assert found[0] == 60
    assert "3 requests wait" in found[1].reason


@pytest.mark.parametrize("change", [{"running": 1, "iterations": None}, {"kv_usage": 0.1}, {"waiting": 0}])
def test_rule_2_needs_all_of_its_signs(change: dict[str, float | None]) -> None:
    found = first(Health.STALLED, lambda now: (IDLE._replace(waiting=3, iterations=now)._replace(**change), FLAT))
    assert found is None


def test_row18_rule_3_two_polls_without_an_engine_whatever_the_api_says() -> None:
    liveness = Liveness(0.0)
    assert liveness.engine(False) is None
    assert liveness.engine(True) is None
    assert liveness.engine(False) is None
    verdict = liveness.engine(False)
    assert verdict
    assert verdict.health is Health.ENGINE_DEAD


def test_row27_rule_4_a_busy_engine_is_left_alone_for_ten_minutes() -> None:
    verdicts = list(looks(lambda now: (None, FLAT._replace(cpu_s=now))))
    assert [v.health for _, v in verdicts[:2]] == [Health.UNKNOWN] * 2
    assert {v.health for at, v in verdicts if 20 <= at <= 600} == {Health.BUSY}
    assert next(at for at, v in verdicts if v.health is Health.STALLED) == 610


@pytest.mark.parametrize("sign", ["log_bytes", "utilization"])
def test_row27_rule_4_other_signs_of_work(sign: str) -> None:
    found = first(Health.STALLED, lambda now: (None, FLAT._replace(**{sign: int(now) + 1})))
    assert found
    assert found[0] == 610


def test_rule_4_a_silent_engine_that_does_nothing_stalls_after_two_minutes() -> None:
    found = first(Health.STALLED, lambda now: (None, FLAT))
    assert found
    assert found[0] == 120
    assert "has done nothing for 120 s" in found[1].reason


def test_rule_4_an_answer_clears_the_count() -> None:
    found = first(Health.STALLED, lambda now: (IDLE if now % 100 == 0 else None, FLAT))
    assert found is None


def test_row17_rule_5_two_failed_canaries_on_an_idle_engine_stall() -> None:
    liveness = Liveness(0.0)
    asked = []
    for now, verdict in looks(lambda now: (IDLE, FLAT), liveness=liveness):
        if verdict.wants_canary:
            asked.append(now)
            liveness.canary(False, now + 1)
        if verdict.health is Health.STALLED:
            assert asked == [300, 310]
            assert "2 one-token requests" in verdict.reason
            return
    pytest.fail("never stalled")


def test_rule_5_one_failure_is_forgiven_and_success_waits_again() -> None:
    liveness = Liveness(0.0)
    asked = []
    for now, verdict in looks(lambda now: (IDLE, FLAT), liveness=liveness):
        assert verdict.health is Health.HEALTHY
        if verdict.wants_canary:
            asked.append(now)
            liveness.canary(len(asked) % 2 == 0, now)
    assert asked == [300, 310, 610, 620, 920, 930, 1230, 1240]


def test_rule_5_asks_once_at_a_time_and_never_a_working_engine() -> None:
    assert sum(v.wants_canary for _, v in looks(lambda now: (IDLE, FLAT))) == 1  # no answer was given to the first
    working = looks(lambda now: (IDLE._replace(iterations=now, running=1), FLAT))
    assert not any(v.wants_canary for _, v in working)


def test_rule_6_a_counter_that_goes_backwards_is_another_engine() -> None:
    def look(now: float) -> Look:
        return IDLE._replace(running=1, iterations=now if now < 300 else now - 300), FLAT

    told = [(at, event) for at, verdict in looks(look) for event in verdict.events]
    assert [at for at, _ in told] == [300]
    assert "restarted by itself" in told[0][1]
    stuck = first(Health.STALLED, lambda now: (IDLE._replace(running=1, iterations=900 if now < 100 else 0), FLAT))
    assert stuck
    assert stuck[0] == 220  # the baseline began anew


def test_rule_7_no_acceptance_alarms_once_and_kills_nothing() -> None:
    def look(now: float) -> Look:
        return IDLE._replace(running=1, iterations=now, drafted=now * 10, accepted=0), FLAT

    verdicts = [verdict for _, verdict in looks(look)]
    alarms = [event for verdict in verdicts for event in verdict.events]
    assert len(alarms) == 1
    assert alarms[0].startswith("ALARM: none of 500 drafted tokens was accepted")
    assert {verdict.health for verdict in verdicts} == {Health.HEALTHY}


def test_rule_7_full_acceptance_alarms_when_the_text_repeats() -> None:
    def look(now: float) -> Look:
        return IDLE._replace(running=1, iterations=now, drafted=now * 10, accepted=now * 9.95), FLAT

    liveness = Liveness(0.0)
    asked = [now for now, verdict in looks(look, liveness=liveness) if verdict.wants_sample]
    assert asked == [50]
    assert liveness.sample(False) is None
    again = Liveness(0.0)
    list(looks(look, liveness=again))
    assert "degenerate" in (again.sample(True) or "")
    assert again.sample(True) is None


def test_rule_7_is_silent_in_between_and_below_500_tokens() -> None:
    def look(now: float) -> Look:
        return IDLE._replace(running=1, iterations=now, drafted=min(now, 499), accepted=0), FLAT

    assert not any(v.events or v.wants_sample for _, v in looks(look))


def test_metrics_without_these_series_stall_nothing() -> None:
    assert first(Health.STALLED, lambda now: (Scrape(), FLAT)) is None


@given(
    st.lists(
        st.tuples(st.floats(0.5, 60), st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)), st.booleans()),
        max_size=150,
    )
)
def test_an_engine_that_iterates_between_any_two_looks_never_stalls(
    steps: list[tuple[float, tuple[int, int] | None, bool]],
) -> None:
    liveness = Liveness(0.0)
    now = 0.0
    for index, (pause_s, load, scraped) in enumerate(steps):
        now += pause_s
        running, waiting = load or (0, 0)
        scrape = IDLE._replace(iterations=index, running=running, waiting=waiting, kv_usage=0.5)
        # Failed scrapes in between last at most two looks.
        answer = scrape if scraped or index % 3 == 0 else None
        verdict = liveness.scraped(answer, FLAT._replace(log_bytes=index), now)
        if verdict.wants_canary:
            liveness.canary(True, now)
        assert verdict.health is not Health.STALLED


@given(st.floats(1, 30), st.integers(1, 5))
def test_a_stuck_engine_stalls_within_two_minutes_and_a_look(every_s: float, running: int) -> None:
    liveness = Liveness(0.0)
    now = 0.0
    while liveness.scraped(IDLE._replace(running=running), FLAT, now).health is not Health.STALLED:
        now += every_s
        assert now <= 120 + every_s
