"""``thor-spec top``: board and engine, live."""

import http.client
import itertools
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from thor_spec.device.memory import Memory
    from thor_spec.device.nvml import Nvml
    from thor_spec.device.sensors import Sensors
    from thor_spec.guard.status import Status
    from thor_spec.serve.vitals import Vitals

GIB = 1 << 30
TIMEOUT_S = 2.0
BAR_WIDTH = 24


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: thor-spec top --interval 5")(top)


def top(
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 2.0,
    count: Annotated[int | None, typer.Option(help="Looks, then end.", min=1, show_default="until Ctrl-C")] = None,
) -> None:
    """Watch the board and the engine: speed, acceptance, cache, memory, power, heat. Ctrl-C ends it.

    A live view on a terminal, a line per look elsewhere. Looking takes no lock, and the engine is asked for its metrics
    only. What a machine does not tell is shown as "-".
    """
    watcher = _Watcher()
    looks: Iterable[int] = range(count) if count else itertools.count()
    try:
        if sys.stdout.isatty():
            _live(watcher, looks, interval)
        else:
            for i in looks:
                if i:
                    time.sleep(interval)
                print(_line(watcher.look()), flush=True)
    except KeyboardInterrupt:
        return


def _live(watcher: "_Watcher", looks: Iterable[int], interval: float) -> None:
    from rich.live import Live

    with Live(_table(watcher.look()), auto_refresh=False) as view:
        view.refresh()
        for i in looks:
            if i:
                time.sleep(interval)
                view.update(_table(watcher.look()), refresh=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    status: "Status"
    vitals: "Vitals | None"
    """None when no engine answers."""
    memory: "Memory"
    sensors: "Sensors"
    nvml: "Nvml | None"


class _Watcher:
    """Keeps the last answer of the engine, for what happens between two looks."""

    def __init__(self) -> None:
        from thor_spec.device import board, cuda

        gpu = cuda.probe()
        self._asks_nvml = gpu is not None and not board.detect(Path("/"), gpu).is_jetson  # sysfs tells more there
        self._before: object = None

    def look(self) -> _Frame:
        from thor_spec import sysfs
        from thor_spec.device import memory, nvml, sensors
        from thor_spec.guard.status import status

        found = status()
        return _Frame(
            status=found,
            vitals=self._vitals(found.holder.url if found.holder else None),
            memory=memory.parse(sysfs.text(Path("/proc/meminfo")) or ""),
            sensors=sensors.read(),
            nvml=nvml.probe() if self._asks_nvml else None,
        )

    def _vitals(self, url: str | None) -> "Vitals | None":
        from thor_spec.serve import vitals

        text = _metrics(url) if url else None
        if text is None:
            self._before = None
            return None
        try:
            now = vitals.Sample.read(text, time.monotonic())
        except ValueError:
            return None
        before, self._before = self._before, now
        return vitals.between(before if isinstance(before, vitals.Sample) else None, now)


def _metrics(url: str) -> str | None:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.read().decode(errors="replace") if answer.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _engine_rows(frame: _Frame) -> dict[str, str]:
    from thor_spec.serve.vitals import Vitals

    holder = frame.status.holder
    job = "free" if not frame.status.held else f"{holder.title}, {holder.phase}" if holder else "held"
    job = "".join(c if c.isprintable() else "?" for c in job)  # the lock's record may be writable by others
    vitals = frame.vitals or Vitals()
    return {
        "job": job,
        "tok/s": _number(vitals.tokens_per_s, "{:.1f}"),
        "tok/step": _number(vitals.tokens_per_step, "{:.2f}"),
        "acceptance": " ".join(f"{share:.2f}" for share in vitals.acceptance) or "-",
        "running": _number(vitals.running, "{}"),
        "waiting": _number(vitals.waiting, "{}"),
        "KV": _number(vitals.kv_usage, "{:.1%}"),
        "hits": _number(vitals.hit_rate, "{:.0%}"),
    }


def _board_rows(frame: _Frame) -> dict[str, str]:
    sensors, nvml = frame.sensors, frame.nvml
    watts = sensors.total_milliwatts if sensors.total_milliwatts is not None else nvml.milliwatts if nvml else None
    heat = sensors.celsius.get("tj", nvml.celsius if nvml else None)
    margin = frame.status.margin_bytes
    throttled = {True: "yes", False: "no", None: "-"}[sensors.gpu_throttled]
    return {
        "margin": "-" if margin is None else f"{margin / GIB:.2f} GiB",
        "available": "-" if frame.memory.available is None else f"{frame.memory.available / GIB:.2f} GiB",
        "power": "-" if watts is None else f"{watts / 1000:.1f} W",
        "heat": "-" if heat is None else f"{heat:g} °C",
        "GPU": _clock(frame),
        "throttled": throttled,
    }


def _clock(frame: _Frame) -> str:
    if (clock := frame.sensors.gpu) is not None and clock.now is not None:
        return f"{clock.now / 1e6:.0f} MHz" if clock.now else "gated"
    return _number(frame.nvml.percent, "{} %") if frame.nvml else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _line(frame: _Frame) -> str:
    rows = {**_engine_rows(frame), **_board_rows(frame)}
    return f"{time.strftime('%H:%M:%S')}  " + "  ".join(f"{name} {value}" for name, value in rows.items())


def _table(frame: _Frame) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    memory, kv = frame.memory, frame.vitals.kv_usage if frame.vitals else None
    used = 1 - memory.available / memory.total if memory.available is not None and memory.total else None
    rows = {**_engine_rows(frame), **_board_rows(frame)}
    rows |= {name: f"{milliwatts / 1000:.1f} W" for name, milliwatts in frame.sensors.milliwatts.items()}
    rows |= {name: f"{celsius:g} °C" for name, celsius in frame.sensors.celsius.items() if name != "tj"}
    bars = {"KV": _bar(kv), "available": _bar(used)}
    for name, value in rows.items():
        red = name == "throttled" and value == "yes"
        table.add_row(name, Text(value + bars.get(name, "")), style="red" if red else None)
    return table


def _bar(share: float | None) -> str:
    if share is None:
        return ""
    filled = min(BAR_WIDTH, max(0, round(share * BAR_WIDTH)))
    return f"  [{'#' * filled}{' ' * (BAR_WIDTH - filled)}]"
