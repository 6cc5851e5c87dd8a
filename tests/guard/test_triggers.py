"""The rules of the memory watchdog, on series of readings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thor_spec.guard.memory import GIB, Reading
from thor_spec.guard.triggers import Trigger, Triggers

from .series import FIXTURES, FLOOR_BYTES, TOTAL_BYTES, readings


def first_trigger(series: list[Reading], floor_bytes: int = FLOOR_BYTES) -> tuple[int, Trigger] | None:
    triggers = Triggers(floor_bytes)
    for index, reading in enumerate(series):
        if trigger := triggers.judge(reading):
            return index, trigger
    return None


def test_two_polls_below_the_floor() -> None:
    found = first_trigger(list(readings([20, 3.9, 20, 3.9, 3.9])))
    assert found
    index, trigger = found
    assert (index, trigger.kind) == (4, "floor")
    assert trigger.margin_bytes == pytest.approx(-0.1 * GIB, abs=2)
    assert "MemAvailable 3.90 GiB" in trigger.describe()
    assert "-0.10 GiB" in trigger.describe()


def test_exactly_at_the_floor_is_no_crossing() -> None:
    assert first_trigger(list(readings([4.0] * 40))) is None


def test_a_steep_fall_is_stopped_before_the_floor() -> None:
    series = list(readings(11.5 - 0.5 * step for step in range(20)))  # 2 GiB/s
    found = first_trigger(series)
    assert found
    index, trigger = found
    assert trigger.kind == "slope"
    assert series[index].available_bytes > FLOOR_BYTES


def test_a_steep_fall_far_above_the_floor_is_a_load() -> None:
    assert first_trigger(list(readings([100 - 2 * step for step in range(43)]))) is None  # 8 GiB/s, ends at 16 GiB


def test_one_large_allocation_that_ends_above_the_floor_is_no_fall() -> None:
    assert first_trigger(list(readings([60.0] * 8 + [6.0] * 20))) is None


def test_one_steep_pair_is_no_slope() -> None:
    assert first_trigger(list(readings([10.0] * 8 + [9.0] + [9.0] * 8))) is None


@pytest.mark.parametrize(("full", "gib", "kind"), [(20.0, 7.0, None), (20.1, 8.0, None), (20.1, 7.0, "pressure")])
def test_pressure_counts_near_the_floor_only(full: float, gib: float, kind: str | None) -> None:
    found = first_trigger(list(readings([gib] * 20, full=full)))
    assert (found and found[1].kind) == kind
    if found:
        assert found[0] == 8  # two seconds after the first


def test_pressure_must_last() -> None:
    series = [r._replace(full_avg10=0.0 if i % 7 == 6 else 50.0) for i, r in enumerate(readings([7.0] * 60))]
    assert first_trigger(series) is None


def test_without_pressure_information_the_floor_still_guards() -> None:
    found = first_trigger(list(readings([6, 3, 3], full=None)))
    assert found
    assert found[1].kind == "floor"


def test_row15_a_gap_drops_the_slope_and_the_wall_clock_is_never_asked() -> None:
    steep = list(readings([11 - 0.4 * step for step in range(9)]))
    resumed = [reading._replace(at_s=reading.at_s + 3600) for reading in readings([5.6, 5.1, 4.6])]
    assert first_trigger(steep[:8] + resumed) is None
    at_once = [reading._replace(at_s=reading.at_s + 2.0) for reading in readings([5.6, 5.1, 4.6])]
    assert first_trigger(steep[:8] + at_once) is not None  # without the gap, the same readings are a fall


def test_row15_pressure_does_not_last_across_a_gap() -> None:
    first, second = readings([7.0, 7.0], full=50.0)
    assert first_trigger([first, second._replace(at_s=60.0), second._replace(at_s=61.0)]) is None


def test_row28_the_kernel_log_kills_at_once_above_the_floor() -> None:
    triggers = Triggers(FLOOR_BYTES)
    assert triggers.judge(next(readings([50]))) is None
    lines = (FIXTURES / "dmesg_unified_oom.txt").read_text().splitlines()
    found = [trigger for line in lines if (trigger := triggers.kernel_line(line))]
    assert [trigger.kind for trigger in found] == ["kernel log"]
    assert found[0].available_bytes == 50 * GIB
    assert "_memdescAllocInternal" in found[0].value


GIBS = st.floats(0.0, 120.0, allow_nan=False)


@settings(max_examples=300)
@given(st.lists(st.floats(12.01, 120.0), min_size=1, max_size=60), st.floats(0.0, 100.0))
def test_nothing_triggers_above_three_floors(series: list[float], full: float) -> None:
    assert first_trigger(list(readings(series, full=full))) is None


@settings(max_examples=300)
@given(st.lists(GIBS, max_size=40), st.floats(0.0, 3.99))
def test_two_low_polls_always_trigger(before: list[float], low: float) -> None:
    found = first_trigger(list(readings([*before, low, low])))
    assert found is not None


@settings(max_examples=300)
@given(st.floats(0.05, 8.0), st.floats(4.5, 60.0))
def test_a_steady_fall_is_stopped_within_a_second_of_the_crossing(gib_per_s: float, start: float) -> None:
    step_gib = gib_per_s * 0.25
    steps = int((start - FLOOR_BYTES / GIB) / step_gib) + 8  # to the floor, and a few polls beyond it
    series = list(readings([max(0.0, start - step_gib * step) for step in range(steps)]))
    crossed = next(i for i, reading in enumerate(series) if reading.available_bytes < FLOOR_BYTES)
    found = first_trigger(series[: crossed + 5])
    assert found is not None
    assert series[found[0]].at_s - series[crossed].at_s <= 0.5


@settings(max_examples=200)
@given(st.lists(st.tuples(st.floats(0.01, 30.0), GIBS), max_size=60), st.integers(1, 60))
def test_a_trigger_depends_on_differences_of_time_only(steps: list[tuple[float, float]], shift: int) -> None:
    series, at_s = [], 0.0
    for pause_s, value in steps:
        at_s += pause_s
        series.append(Reading(at_s, int(value * GIB), TOTAL_BYTES, 30.0))
    moved = [reading._replace(at_s=reading.at_s + shift * 1024.0) for reading in series]
    here, there = first_trigger(series), first_trigger(moved)
    assert (here and (here[0], here[1].kind)) == (there and (there[0], there[1].kind))
