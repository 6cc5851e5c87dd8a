"""Heat and throttling, from sysfs. What cannot be read is None, never 0: it warns or informs, and stops no job.

Source: jetson_stats and ThorFAN, by their published paths; numbers of zones and devices change between boots.
"""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SYS = Path("/sys")


class Heat(NamedTuple):
    """The device's temperature and throttle signs at one moment."""

    tj_millidegrees: int | None
    throttled: bool | None
    over_current_events: int | None


def read(root: Path = SYS) -> Heat:
    """Return what ``root`` (``/sys``) tells."""
    zones = root / "class" / "thermal"
    tj = next((_number(zone / "temp") for zone in _of_type(zones, "thermal_zone*", "tj-thermal")), None)
    alerts = [_number(device / "cur_state") for device in _of_type(zones, "cooling_device*", "gpu-throttle-alert")]
    known = [alert for alert in alerts if alert is not None]
    events = [_number(path) for path in sorted(root.glob("soctherm_oc/oc*_event_cnt"))]
    events += [_number(path) for path in sorted(root.glob("devices/platform/*/oc*_event_cnt"))]
    counts = [count for count in events if count is not None]
    return Heat(tj, any(known) if known else None, sum(counts) if counts else None)


def input_watts(root: Path = SYS) -> float | None:
    """Return the power that the whole board takes in: the ina238's ``power1_input``, in microwatts there."""
    for device in sorted((root / "class" / "hwmon").glob("hwmon*")):
        if _text(device / "name") == "ina238" and (microwatts := _number(device / "power1_input")) is not None:
            return microwatts / 1e6
    return None


def _of_type(folder: Path, pattern: str, kind: str) -> list[Path]:
    return [entry for entry in sorted(folder.glob(pattern)) if _text(entry / "type") == kind]


def _text(path: Path) -> str | None:
    # A gated zone fails with EAGAIN, which Python's text layer turns into a TypeError.
    with suppress(OSError, TypeError, ValueError):
        return path.read_text(encoding="ascii").strip()
    return None


def _number(path: Path) -> int | None:
    text = _text(path)
    try:
        return int(text) if text else None
    except ValueError:
        return None
