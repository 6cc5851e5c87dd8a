"""Heat, power, clocks and throttling, from sysfs. Numbers of zones and devices change between boots; types do not.

Source: jetson_stats and ThorFAN, by their published paths.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from thor_spec import sysfs

_RAILS = (1, 2, 3)  # of an ina3221; in4 and on are shunts and sums, not rails
_ALERT = "-throttle-alert"
_GPU_CLOCK = "devfreq-gpu-gpc-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """One clock in Hz. 0 is a gated one; ``pinned`` says that it may not move."""

    now: int | None
    highest: int | None
    lowest: int | None
    governor: str | None

    @property
    def pinned(self) -> bool | None:
        """Return whether lowest and highest agree."""
        return None if self.highest is None or self.lowest is None else self.highest == self.lowest


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensors:
    """One look. A figure that cannot be read is absent or None, never 0."""

    celsius: Mapping[str, float] = field(default_factory=dict)
    """By zone, without its ``-thermal``."""
    critical_celsius: float | None = None
    milliwatts: Mapping[str, int] = field(default_factory=dict)
    """By rail."""
    total_milliwatts: int | None = None
    """What the board takes in."""
    gpu: Clock | None = None
    memory: Clock | None = None
    throttled: Mapping[str, bool] = field(default_factory=dict)
    """By what is throttled: cpu, gpu, soc012, soc345."""
    gpu_cooling: tuple[int, int] | None = None
    """Step of the GPU's clock limit, and the highest there is."""
    over_current_events: int | None = None
    fan_rpm: int | None = None
    fan_share: float | None = None
    """Of its full speed, as asked for."""

    @property
    def gpu_throttled(self) -> bool | None:
        """Return whether the GPU is held back: by an alert, or by a limit on its clock."""
        return _either(self.throttled.get("gpu"), self.gpu_cooling)


def read(root: Path = Path("/")) -> Sensors:
    """Return what sysfs below ``root`` tells."""
    sys = root / "sys"
    thermal = sys / "class" / "thermal"
    zones = {kind.removesuffix("-thermal"): zone for zone, kind in _typed(thermal, "thermal_zone*")}
    heat = {name: value / 1000 for name, zone in zones.items() if (value := sysfs.number(zone / "temp")) is not None}
    cooling = _cooling(sys)
    rails, total = _power(sys / "class" / "hwmon")
    rpm, share = _fan(sys / "class" / "hwmon")
    return Sensors(
        celsius=heat,
        critical_celsius=_critical(zones.values()),
        milliwatts=rails,
        total_milliwatts=total,
        gpu=_clock(sys / "class" / "devfreq" / "gpu-gpc-0"),
        memory=_clock(sys / "class" / "devfreq" / "bwmgr"),
        throttled=_alerts(cooling),
        gpu_cooling=_steps(cooling.get(_GPU_CLOCK)),
        over_current_events=over_current_events(sys),
        fan_rpm=rpm,
        fan_share=share,
    )


def gpu_throttled(sys: Path) -> bool | None:
    """Return ``Sensors.gpu_throttled`` from ``sys`` (``/sys``), without a look at anything else."""
    cooling = _cooling(sys)
    return _either(_alerts(cooling).get("gpu"), _steps(cooling.get(_GPU_CLOCK)))


def over_current_events(sys: Path) -> int | None:
    """Return how often the board drew too much, since it was switched on."""
    files = (*sorted(sys.glob("soctherm_oc/oc*_event_cnt")), *sorted(sys.glob("devices/platform/*/oc*_event_cnt")))
    counted = [count for path in files if (count := sysfs.number(path)) is not None]
    return sum(counted) if counted else None


def _either(alert: bool | None, limit: tuple[int, int] | None) -> bool | None:
    signs = [sign for sign in (alert, None if limit is None else limit[0] > 0) if sign is not None]
    return any(signs) if signs else None


def _cooling(sys: Path) -> dict[str, Path]:
    return {kind: device for device, kind in _typed(sys / "class" / "thermal", "cooling_device*")}


def _alerts(cooling: Mapping[str, Path]) -> dict[str, bool]:
    return {
        kind.removesuffix(_ALERT): state > 0
        for kind, device in cooling.items()
        if kind.endswith(_ALERT) and (state := sysfs.number(device / "cur_state")) is not None
    }


def _typed(folder: Path, pattern: str) -> Iterator[tuple[Path, str]]:
    for entry in sorted(folder.glob(pattern)):
        if kind := sysfs.text(entry / "type"):
            yield entry, kind


def _named(folder: Path, name: str) -> Iterator[Path]:
    yield from (entry for entry in sorted(folder.glob("hwmon*")) if sysfs.text(entry / "name") == name)


def _critical(zones: Iterable[Path]) -> float | None:
    limits = [
        value / 1000
        for zone in zones
        for trip in sorted(zone.glob("trip_point_*_type"))
        if sysfs.text(trip) == "critical"
        and (value := sysfs.number(trip.with_name(trip.name.replace("_type", "_temp")))) is not None
    ]
    return min(limits, default=None)


def _power(hwmon: Path) -> tuple[dict[str, int], int | None]:
    rails = {}
    for chip in _named(hwmon, "ina3221"):
        for i in _RAILS:
            label = sysfs.text(chip / f"in{i}_label")
            volts, amps = (sysfs.number(chip / f"{kind}{i}_input") for kind in ("in", "curr"))
            if label and volts is not None and amps is not None:
                rails[label] = volts * amps // 1000  # mV times mA
    inputs = [sysfs.number(chip / "power1_input") for chip in _named(hwmon, "ina238")]
    return rails, next((value // 1000 for value in inputs if value is not None), None)


def _fan(hwmon: Path) -> tuple[int | None, float | None]:
    rpm = next((sysfs.number(chip / "rpm") for chip in _named(hwmon, "pwm_tach")), None)
    pwm = next((sysfs.number(chip / "pwm1") for chip in _named(hwmon, "pwmfan")), None)
    return rpm, None if pwm is None else pwm / 255


def _clock(folder: Path) -> Clock | None:
    now, highest, lowest = (sysfs.number(folder / f"{name}_freq") for name in ("cur", "max", "min"))
    if now is None and highest is None:
        return None
    return Clock(now=now, highest=highest, lowest=lowest, governor=sysfs.text(folder / "governor"))


def _steps(device: Path | None) -> tuple[int, int] | None:
    if device is None:
        return None
    now, most = sysfs.number(device / "cur_state"), sysfs.number(device / "max_state")
    return None if now is None or most is None else (now, most)
