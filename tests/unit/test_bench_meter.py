"""Power, heat and throttling, as sensors and nvidia-smi tell them."""

from pathlib import Path

import pytest

from thor_spec.bench import meter
from thor_spec.bench.meter import Meter, Sample


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
