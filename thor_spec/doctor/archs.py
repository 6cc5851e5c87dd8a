"""For which GPUs torch and vLLM's extensions were built. Torch's list does not describe the extensions."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from thor_spec.device.machine import Machine
from thor_spec.device.torch_build import covers
from thor_spec.doctor.report import Check, Level

TIMEOUT_S = 120
_ELF = re.compile(r"\b(sm_\d{2,3}[af]?)\b", re.ASCII)
_NO_CODE = "does not contain device code"  # with an exit code like that of a library that cannot be read
_SPARE = {"_qutlass_C": "MXFP4 and NVFP4 products of Qutlass"}
"""Libraries that a build for other GPUs carries along, by the beginning of their names, and what they are for."""
_REBUILD = "Take a wheel or an image for this GPU, or build with TORCH_CUDA_ARCH_LIST={}."


def check(machine: Machine) -> Iterator[Check]:
    """Yield whether torch's kernels, and vLLM's extensions, run on this GPU; nothing where there is none."""
    capability = machine.gpu.capability if machine.gpu else machine.torch.capability
    if capability is None:
        return
    wanted = f"{capability[0]}.{capability[1]}" + ("a" if capability >= (9, 0) else "")
    if machine.torch.archs:
        good = covers(machine.torch.archs, capability)
        yield Check(
            name="torch archs",
            level=Level.OK if good else Level.FAIL,
            detail=" ".join(machine.torch.archs),
            remedy="" if good else _REBUILD.format(wanted),
        )
    if not machine.live:
        return
    libraries = extensions()
    tool = cuobjdump()
    if not libraries:
        return
    if tool is None:
        yield Check(
            name="extensions",
            level=Level.WARN,
            detail="cuobjdump is not here, so nobody knows which GPUs vLLM's extensions are for",
            remedy="Install CUDA's cuobjdump, or trust the first start.",
        )
        return
    for library in libraries:
        archs = list_archs(tool, library)
        if archs is None:
            yield Check(
                name="extensions",
                level=Level.WARN,
                detail=f"{tool} cannot read {library.name}, so nobody knows which GPUs it is for",
                remedy="Install the cuobjdump of this CUDA, or trust the first start.",
            )
            continue
        good = not archs or covers(archs, capability)  # a library without GPU code needs none
        spare = next((what for name, what in _SPARE.items() if library.name.startswith(name)), "")
        built_for = " ".join(archs) or "no GPU code"
        yield Check(
            name="extensions",
            level=Level.OK if good or spare else Level.FAIL,
            detail=f"{library.name}: {built_for}" + (f"; no {spare} on this GPU" if spare and not good else ""),
            remedy="" if good or spare else _REBUILD.format(wanted),
        )


def extensions() -> list[Path]:
    """Return the libraries with vLLM's kernels."""
    spec = importlib.util.find_spec("vllm")
    folders: Iterable[str] = (spec.submodule_search_locations or ()) if spec else ()
    return [path for folder in folders for path in sorted(Path(folder).glob("*_C*.so"))]


def cuobjdump() -> str | None:
    """Return the tool's path: CUDA's own, or the one that comes with Triton."""
    if found := shutil.which("cuobjdump"):
        return found
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "backends" / "nvidia" / "bin" / "cuobjdump"
        if path.is_file():
            return str(path)
    return None


def list_archs(tool: str, library: Path) -> tuple[str, ...] | None:
    """Return the targets of the GPU code in a library, machine code and PTX; None where the tool cannot tell."""
    found: set[str] = set()
    has_told = False
    for option, kind in (("--list-elf", "sm"), ("--list-ptx", "compute")):
        try:
            done = subprocess.run(
                [tool, option, str(library)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except (OSError, subprocess.SubprocessError):
            continue
        has_told |= done.returncode == 0 or _NO_CODE in done.stdout + done.stderr
        found |= {name.replace("sm", kind, 1) for name in _ELF.findall(done.stdout)}
    return tuple(sorted(found)) if has_told or found else None
