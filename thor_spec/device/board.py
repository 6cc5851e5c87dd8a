"""Which machine this is: Thor, Orin, GB10, another with CUDA, or one without."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from thor_spec import sysfs
from thor_spec.device.cuda import Gpu
from thor_spec.device.l4t import Release, parse_release

_THOR_GPU = "sys/class/devfreq/gpu-gpc-0"


class Kind(StrEnum):
    """A machine, as far as our advice differs."""

    THOR = "thor"
    ORIN = "orin"
    GB10 = "gb10"
    CUDA = "cuda"
    NONE = "none"


_BY_CHIP = {"nvidia,tegra264": Kind.THOR, "nvidia,tegra234": Kind.ORIN}
_BY_CAPABILITY = {(11, 0): Kind.THOR, (8, 7): Kind.ORIN, (12, 1): Kind.GB10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The machine and what says so."""

    kind: Kind
    model: str | None
    release: Release | None
    evidence: tuple[str, ...]

    @property
    def is_jetson(self) -> bool:
        """Return whether the vendor's board tools and sensors are to be expected."""
        return self.kind in (Kind.THOR, Kind.ORIN)

    @property
    def is_unified(self) -> bool:
        """Return whether GPU and CPU share the memory, by what the machine is: no driver has to say so."""
        return self.kind in (Kind.THOR, Kind.ORIN, Kind.GB10)


def compatible(text: str) -> tuple[str, ...]:
    """Return the names in ``/proc/device-tree/compatible``, which NULs separate."""
    return tuple(name for name in text.split("\0") if name.strip())


def detect(root: Path, gpu: Gpu | None) -> Board:
    """Return what the files below ``root`` and the GPU say. The release is never evidence: it names the system only."""
    found: list[tuple[Kind, str]] = []
    if (root / _THOR_GPU).is_dir():
        found.append((Kind.THOR, f"/{_THOR_GPU}"))
    tree = root / "proc" / "device-tree"
    chips = compatible(sysfs.text(tree / "compatible") or "")
    found += [(kind, chip) for chip, kind in _BY_CHIP.items() if chip in chips]
    if gpu is not None:
        kind = _BY_CAPABILITY.get(gpu.capability, Kind.CUDA)
        found.append((kind, f"{gpu.name}, capability {gpu.capability[0]}.{gpu.capability[1]}"))
    kind = next((kind for kind, _ in found if kind is not Kind.CUDA), Kind.CUDA if found else Kind.NONE)
    return Board(
        kind=kind,
        model=sysfs.text(tree / "model"),
        release=parse_release(sysfs.text(root / "etc" / "nv_tegra_release") or ""),
        evidence=tuple(text for said, text in found if said is kind),
    )
