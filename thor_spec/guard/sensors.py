"""Heat and throttling, from sysfs. What cannot be read is None, never 0: it warns or informs, and stops no job."""

from pathlib import Path
from typing import NamedTuple

from thor_spec import sysfs
from thor_spec.device import sensors

SYS = Path("/sys")


class Heat(NamedTuple):
    """The device's temperature and throttle signs at one moment."""

    tj_millidegrees: int | None
    throttled: bool | None
    over_current_events: int | None


def read(root: Path = SYS) -> Heat:
    """Return what ``root`` (``/sys``) tells; no more, because a slow sensor would keep the watchdog waiting."""
    zones = sorted((root / "class" / "thermal").glob("thermal_zone*"))
    tj = next((sysfs.number(zone / "temp") for zone in zones if sysfs.text(zone / "type") == "tj-thermal"), None)
    return Heat(tj, sensors.gpu_throttled(root), sensors.over_current_events(root))
