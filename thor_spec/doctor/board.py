"""The board: what it is, how it is set, and whether it is held back."""

from collections.abc import Iterator

from thor_spec.device.board import Kind
from thor_spec.device.machine import Machine
from thor_spec.device.power import THOR_MODES
from thor_spec.doctor.report import Check, Level

_THOR_RELEASE = 38
_WARM_C = 95.0
_HOT_C = 105.0  # where the guard begins to warn
_CUDA_OF_THOR = (13, 0)


def check(machine: Machine) -> Iterator[Check]:
    """Yield a line for each thing that this kind of machine tells; a machine without a board tells little."""
    yield from _board(machine)
    yield from _driver(machine)
    if machine.board.is_jetson:
        yield from _release(machine)
        yield from _mode(machine)
    yield from _heat(machine)
    yield from _throttling(machine)
    yield from _power(machine)


def _board(machine: Machine) -> Iterator[Check]:
    board = machine.board
    if board.kind is Kind.NONE:
        yield Check(name="board", level=Level.OK, detail=board.model or "no NVIDIA device")
        return
    evidence = ", ".join(board.evidence)
    yield Check(name="board", level=Level.OK, detail=f"{board.model or board.kind} ({evidence})")


def _release(machine: Machine) -> Iterator[Check]:
    release = machine.board.release
    if release is None:
        yield Check(
            name="l4t",
            level=Level.WARN,
            detail="/etc/nv_tegra_release cannot be read here",
            remedy="In a container this is usual: run `thor-spec doctor` on the host as well.",
        )
        return
    old = machine.board.kind is Kind.THOR and release.major < _THOR_RELEASE
    yield Check(
        name="l4t",
        level=Level.FAIL if old else Level.OK,
        detail=str(release),
        remedy=f"Thor needs L4T {_THOR_RELEASE} or newer. Flash JetPack 7." if old else "",
    )


def _driver(machine: Machine) -> Iterator[Check]:
    speaks = machine.gpu.cuda if machine.gpu else machine.driver.cuda
    if speaks is None:
        return
    detail = f"{machine.driver.driver or '?'}, CUDA {speaks[0]}.{speaks[1]}"
    wanted = _CUDA_OF_THOR if machine.board.kind is Kind.THOR else (0, 0)
    built = _version(machine.torch.cuda)
    if speaks < wanted:
        remedy = f"Thor needs a driver that speaks CUDA {wanted[0]}.{wanted[1]}. Flash JetPack 7."
        yield Check(name="driver", level=Level.FAIL, detail=detail, remedy=remedy)
    elif built is not None and built[0] > speaks[0]:
        yield Check(
            name="driver",
            level=Level.FAIL,
            detail=f"{detail}, and torch is built for CUDA {machine.torch.cuda}",
            remedy="Take a build or an image for the driver's CUDA, or a newer driver.",
        )
    elif built is not None and built > speaks:
        yield Check(
            name="driver",
            level=Level.WARN,
            detail=f"{detail}, and torch is built for CUDA {machine.torch.cuda}",
            remedy="Works within one major version, except for code that the driver must compile (PTX).",
        )
    else:
        yield Check(name="driver", level=Level.OK, detail=detail)


def _version(text: str | None) -> tuple[int, int] | None:
    major, _, minor = (text or "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _mode(machine: Machine) -> Iterator[Check]:
    mode = machine.mode
    if mode is None:
        yield Check(
            name="power mode",
            level=Level.WARN,
            detail="nvpmodel does not answer here",
            remedy="In a container this is usual: run `thor-spec doctor` on the host as well.",
        )
        return
    known = THOR_MODES.get(-1 if mode.number is None else mode.number) if machine.board.kind is Kind.THOR else None
    clock = f", GPU up to {known.gpu_mhz} MHz" if known and known.name == mode.name else ""
    lower = known is not None and known.needs_reboot
    yield Check(
        name="power mode",
        level=Level.WARN if lower else Level.OK,
        detail=f"{mode.name}{clock}",
        remedy="Fewer cores and GPU units than 120W or MAXN have. `sudo nvpmodel -m 1` and a reboot." if lower else "",
    )


def _heat(machine: Machine) -> Iterator[Check]:
    tj = machine.sensors.celsius.get("tj")
    if tj is None:
        return
    critical = machine.sensors.critical_celsius
    limit = f" of {critical:g} °C" if critical else ""
    fan = f"Throttling comes near, and the guard warns from {_HOT_C:g} °C. Full fan: `sudo jetson_clocks --fan`."
    warm = tj >= _WARM_C
    yield Check(
        name="heat", level=Level.WARN if warm else Level.OK, detail=f"tj {tj:g} °C{limit}", remedy=fan if warm else ""
    )


def _throttling(machine: Machine) -> Iterator[Check]:
    sensors = machine.sensors
    held = sensors.gpu_throttled
    if held is not None:
        steps = f", clock limit {sensors.gpu_cooling[0]} of {sensors.gpu_cooling[1]}" if sensors.gpu_cooling else ""
        others = [name for name, on in sensors.throttled.items() if on and name != "gpu"]
        level = Level.WARN if held or others else Level.OK
        yield Check(
            name="throttling",
            level=level,
            detail=("GPU held back" if held else ", ".join(others) or "none") + steps,
            remedy=""
            if level is Level.OK
            else "Numbers measured now are not the board's. Cool it, or take a lower power mode.",
        )
    if sensors.over_current_events:
        yield Check(
            name="over-current",
            level=Level.WARN,
            detail=f"{sensors.over_current_events} events since the boot",
            remedy="If they grow under load, the supply is too weak for the power mode: take a lower one.",
        )


def _power(machine: Machine) -> Iterator[Check]:
    sensors = machine.sensors
    if sensors.total_milliwatts is None and not sensors.milliwatts:
        return
    total = "" if sensors.total_milliwatts is None else f"{sensors.total_milliwatts / 1000:.1f} W in all"
    rails = ", ".join(f"{name} {value / 1000:.1f} W" for name, value in sensors.milliwatts.items())
    yield Check(name="power", level=Level.OK, detail="; ".join(part for part in (total, rails) if part))
