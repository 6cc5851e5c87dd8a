"""How long a start may take, with a clock that the test turns."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thor_spec.serve.activity import Activity
from thor_spec.serve.deadlines import LIMITS, Deadlines, Exceeded, Overrun
from thor_spec.serve.phases import Phase

MIN = 60.0
GIB = 1 << 30


def first_overrun(
    phase: Phase,
    activity: Callable[[float], Activity],
    *,
    every_s: float = 5.0,
    until_s: float = 60 * MIN,
    cached: bool = False,
) -> tuple[float, Overrun] | None:
    """Return when a start that stays in ``phase`` is given up."""
    deadlines = Deadlines(0.0, cached=cached)
    deadlines.enter(phase, 0.0)
    now = 0.0
    while now <= until_s:
        if overrun := deadlines.observe(activity(now), now):
            return now, overrun
        now += every_s
    return None


def quiet(now: float) -> Activity:
    return Activity(available_bytes=100 * GIB)


@pytest.mark.parametrize("phase", LIMITS)
def test_row19_a_quiet_phase_ends_at_its_limit(phase: Phase) -> None:
    found = first_overrun(phase, quiet)
    assert found
    at_s, overrun = found
    assert LIMITS[phase].quiet_s < at_s <= LIMITS[phase].quiet_s + 5
    assert (overrun.phase, overrun.exceeded) == (phase, Exceeded.QUIET)
    assert f"The phase {phase} has made no progress" in overrun.describe()


SIGNS: dict[str, Callable[[float], Activity]] = {
    "log": lambda now: Activity(log_bytes=int(now)),
    "read": lambda now: Activity(read_bytes=int(now) << 20),
    "memory": lambda now: Activity(available_bytes=int(100 * GIB - now * (20 << 20))),
    "compilers": lambda now: Activity(compilers=True),
    "cpu": lambda now: Activity(cpu_s=now * 0.5),
}


@pytest.mark.parametrize("sign", SIGNS)
def test_row19_progress_of_any_kind_lasts_to_the_ceiling(sign: str) -> None:
    found = first_overrun(Phase.WEIGHTS, SIGNS[sign])
    assert found
    at_s, overrun = found
    assert overrun.exceeded is Exceeded.PHASE
    assert 15 * MIN < at_s <= 15 * MIN + 5
    assert "has not ended within 15 min" in overrun.describe()


@pytest.mark.parametrize(
    "noise",
    [
        lambda now: Activity(cpu_s=now * 0.02),
        lambda now: Activity(available_bytes=100 * GIB - (int(now) % 10) * (6 << 20)),
        lambda now: Activity(utilization=0.0),
    ],
    ids=["timers", "other programs", "idle GPU"],
)
def test_noise_is_no_progress(noise: Callable[[float], Activity]) -> None:
    found = first_overrun(Phase.WEIGHTS, noise)
    assert found
    assert found[0] <= 125


def test_row20_utilization_alone_extends_by_ten_minutes_at_most() -> None:
    found = first_overrun(Phase.COMPILE, lambda now: Activity(utilization=99.0))
    assert found
    at_s, overrun = found
    assert 20 * MIN < at_s <= 20 * MIN + 5  # ten minutes of quiet, and ten more
    assert overrun.gpu_was_busy
    assert "though the GPU was busy" in overrun.describe()


def test_row20_a_crawl_that_uses_cpu_time_ends_at_the_ceiling() -> None:
    found = first_overrun(Phase.COMPILE, lambda now: Activity(utilization=99.0, cpu_s=now))
    assert found
    assert 25 * MIN < found[0] <= 25 * MIN + 5


@pytest.mark.parametrize(("cached", "minutes"), [(False, 45), (True, 15)])
def test_the_whole_start_has_a_ceiling_shorter_when_cached(cached: bool, minutes: int) -> None:
    deadlines = Deadlines(0.0, cached=cached)
    phases = list(LIMITS)
    for second in range(0, 60 * 60, 5):
        if second % 300 == 0:
            deadlines.enter(phases[second // 300 % len(phases)], second)
        if overrun := deadlines.observe(Activity(log_bytes=second), second):
            assert overrun.exceeded is Exceeded.OVERALL
            assert minutes * MIN < second <= minutes * MIN + 5
            assert f"READY within {minutes} min" in overrun.describe()
            return
    pytest.fail("it went on for ever")


def test_a_new_phase_is_progress() -> None:
    deadlines = Deadlines(0.0, cached=False)
    assert deadlines.observe(quiet(0), 59) is None
    deadlines.enter(Phase.WEIGHTS, 59)
    assert deadlines.observe(quiet(0), 178) is None
    assert deadlines.observe(quiet(0), 180) is not None


@given(st.lists(st.tuples(st.floats(0.1, 300), st.booleans(), st.booleans()), max_size=200))
def test_no_start_outlives_its_overall_limit_and_none_dies_while_it_logs(
    steps: list[tuple[float, bool, bool]],
) -> None:
    deadlines = Deadlines(0.0, cached=True)
    deadlines.enter(Phase.COMPILE, 0.0)
    now, log_bytes = 0.0, 0
    for pause_s, logs, gpu in steps:
        now += pause_s
        log_bytes += logs
        overrun = deadlines.observe(Activity(log_bytes=log_bytes, utilization=50.0 * gpu), now)
        assert (now > 15 * MIN) <= (overrun is not None)
        if overrun:
            assert not (logs and overrun.exceeded is Exceeded.QUIET and log_bytes > 1)
            return
