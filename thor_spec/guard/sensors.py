"""Heat and throttling, from sysfs. What cannot be read is None, never 0: it warns or informs, and stops no job.

Source: jetson_stats and ThorFAN, by their published paths; numbers of zones and devices change between boots.
"""

from pathlib import Path
from typing import NamedTuple

from thor_spec import sysfs

SYS = Path("/sys")


class Heat(NamedTuple):
    """The device's temperature and throttle signs at one moment."""

    tj_millidegrees: int | None
    throttled: bool | None
    over_current_events: int | None


def read(root: Path = SYS) -> Heat:
    """Return what ``root`` (``/sys``) tells."""
    zones = root / "class" / "thermal"
    tj = next((sysfs.number(zone / "temp") for zone in _of_type(zones, "thermal_zone*", "tj-thermal")), None)
    alerts = [sysfs.number(device / "cur_state") for device in _of_type(zones, "cooling_device*", "gpu-throttle-alert")]
    known = [alert for alert in alerts if alert is not None]
    events = [sysfs.number(path) for path in sorted(root.glob("soctherm_oc/oc*_event_cnt"))]
    events += [sysfs.number(path) for path in sorted(root.glob("devices/platform/*/oc*_event_cnt"))]
    counts = [count for count in events if count is not None]
    return Heat(tj, any(known) if known else None, sum(counts) if counts else None)


def _of_type(folder: Path, pattern: str, kind: str) -> list[Path]:
    return [entry for entry in sorted(folder.glob(pattern)) if sysfs.text(entry / "type") == kind]
