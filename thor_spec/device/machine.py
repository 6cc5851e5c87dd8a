"""One look at a machine, for whoever reports on it."""

import sys
from dataclasses import dataclass
from pathlib import Path

from thor_spec import sysfs
from thor_spec.device import board, cuda, memory, power, sensors, smi, torch_build
from thor_spec.device.board import Board
from thor_spec.device.commands import Captured, Commands, Live
from thor_spec.device.cuda import Gpu
from thor_spec.device.memory import Memory
from thor_spec.device.power import PowerMode
from thor_spec.device.sensors import Sensors
from thor_spec.device.smi import Summary
from thor_spec.device.torch_build import TorchBuild

CAPTURED = "captured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a machine tells."""

    board: Board
    gpu: Gpu | None
    memory: Memory
    sensors: Sensors
    mode: PowerMode | None
    driver: Summary
    torch: TorchBuild
    live: bool
    """False for a captured tree: nothing can be tried out there."""


def look(root: Path = Path("/")) -> Machine:
    """Return what the files below ``root`` tell, and the tools: this machine's, or answers in ``root/captured``."""
    live = root == Path("/")
    commands: Commands = Live() if live else Captured(root / CAPTURED)
    gpu = cuda.probe() if live else None
    found = board.detect(root, gpu)
    # Where there is no NVIDIA device, torch takes a second to say what its version says already.
    asks_torch = not live or gpu is not None
    torch_says = commands.ask([sys.executable, "-c", torch_build.PROBE] if live else ["torch"]) if asks_torch else None
    return Machine(
        board=found,
        gpu=gpu,
        memory=memory.parse(sysfs.text(root / "proc" / "meminfo") or ""),
        sensors=sensors.read(root),
        mode=power.parse_mode(commands.ask(["nvpmodel", "-q"]) or "") if found.is_jetson else None,
        driver=smi.parse_table(commands.ask(["nvidia-smi"]) or ""),
        torch=torch_build.parse(torch_says or ""),
        live=live,
    )
