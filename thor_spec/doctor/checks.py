"""The checks, each a function from the machine to findings; none imports vLLM."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from thor_spec.device import cuda
from thor_spec.device import machine as machines
from thor_spec.device.board import detect
from thor_spec.device.cuda import Gpu
from thor_spec.doctor import archs, assembler, board, combinations, container, memory, prefix_cache
from thor_spec.doctor.report import Check, Level, Report
from thor_spec.errors import ThorSpecError
from thor_spec.guard.status import status
from thor_spec.vllm_plugin import compat, reasons
from thor_spec.vllm_plugin.seam import TESTED_VERSIONS, has_gpu_build, require_supported_version, version

_HOPPER = (9, 0)


def examine(root: Path = Path("/")) -> Report:
    """Run every check, or with ``root`` those of a captured machine, whose environment is not there to be checked."""
    machine = machines.look(root)
    if not machine.live:
        found = combinations.facts(machine.board)
        checks = [*board.check(machine), *archs.check(machine), *memory.check(machine), *combinations.check(found)]
        return Report(checks=tuple(checks))
    found = combinations.facts(machine.board, _vllm_version())
    checks = [
        *_python(),
        *_packages(),
        *_vllm(),
        *_plugin(),
        *_torchvision(),
        *board.check(machine),
        *_device(machine.gpu),
        *assembler.check(machine),
        *archs.check(machine),
        *_paths(machine.gpu),
        *_seams(),
        *_runner_kernels(),
        *combinations.check(found),
        *_lock(),
        *memory.check(machine),
    ]
    return Report(checks=tuple(checks))


def examine_image(image: str) -> Report:
    """Check an image by its name alone."""
    found = combinations.facts(detect(Path("/"), cuda.probe()), image=image)
    return Report(checks=(*container.check_image(image), *combinations.check(found)))


def _vllm_version() -> str | None:
    try:
        return version()
    except ThorSpecError:
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Iterator[Check]:
    found = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Check(
        name="python",
        level=Level.OK if good else Level.FAIL,
        detail=found,
        remedy="" if good else "Make the environment with Python 3.11 or newer.",
    )


def _packages() -> Iterator[Check]:
    for name in ("torch", "triton"):
        found = _version(name)
        yield Check(
            name=name,
            level=Level.OK if found else Level.FAIL,
            detail=found or "not installed",
            remedy="" if found else "Run `make serve` once, or install thor-spec's cpu or cuda extra.",
        )


def _vllm() -> Iterator[Check]:
    try:
        found = require_supported_version()
    except ThorSpecError as error:
        what, _, remedy = str(error).partition(". ")
        yield Check(name="vllm", level=Level.FAIL, detail=what, remedy=remedy)
        return
    tested = found in TESTED_VERSIONS
    yield Check(
        name="vllm",
        level=Level.OK if tested else Level.WARN,
        detail=f"{found} ({'CUDA' if has_gpu_build() else 'CPU'} build)",
        remedy="" if tested else f"Supported, but tested with {' and '.join(TESTED_VERSIONS)} only.",
    )


def _plugin() -> Iterator[Check]:
    entry = compat.plugin_entry()
    yield Check(
        name="plugin",
        level=Level.OK if entry else Level.FAIL,
        detail=entry or "not registered with vLLM",
        remedy="" if entry else "Install thor-spec into the environment that runs vLLM: `pip install -e .`.",
    )


def _torchvision() -> Iterator[Check]:
    torch, torchvision = _version("torch"), _version("torchvision")
    if torch is None or torchvision is None or ("+" in torch) == ("+" in torchvision):
        return
    yield Check(
        name="torchvision",
        level=Level.FAIL,
        detail=f"{torchvision} beside torch {torch}: builds that do not match break every vLLM import",
        remedy="`pip uninstall torchvision torchaudio torchcodec`, or install torchvision from torch's own index.",
    )


def _device(found: Gpu | None) -> Iterator[Check]:
    if found is None:
        yield Check(name="gpu", level=Level.OK, detail="none: kernels are interpreted on the CPU")
        return
    capability = ".".join(map(str, found.capability))
    more = f", {found.count} of them" if found.count > 1 else ""
    mismatch = not has_gpu_build()
    yield Check(
        name="gpu",
        level=Level.WARN if mismatch else Level.OK,
        detail=f"{found.name}, capability {capability}{more}",
        remedy="The CPU build of vLLM is installed and will not use it. Install the cuda extra." if mismatch else "",
    )


def _paths(found: Gpu | None) -> Iterator[Check]:
    if found is None or not has_gpu_build():
        yield Check(name="attention", level=Level.OK, detail="CPU_ATTN")
        yield Check(name="gdn", level=Level.OK, detail="vLLM's C++ operators, bf16; runner kernels in torch")
        return
    yield Check(
        name="attention",
        level=Level.OK,
        detail="FlashAttention 3" if found.capability == _HOPPER else "FlashAttention 2",
    )
    if found.capability != _HOPPER:
        yield Check(name="gdn", level=Level.OK, detail="Triton")
        return
    cutlass = importlib.util.find_spec("cutlass") is not None
    yield Check(
        name="gdn",
        level=Level.OK if cutlass else Level.WARN,
        detail="FlashInfer prefill" if cutlass else "Triton prefill, since FlashInfer's needs nvidia-cutlass-dsl",
        remedy="" if cutlass else "`pip install nvidia-cutlass-dsl` for the faster prefill on this GPU.",
    )


def _seams() -> Iterator[Check]:
    for seam, problem in compat.problems().items():
        yield Check(
            name="seam",
            level=Level.FAIL if problem else Level.OK,
            detail=problem or seam.target,
        )


def _runner_kernels() -> Iterator[Check]:
    """Check what is replaced where kernels would be interpreted; the replacements themselves need torch."""
    if has_gpu_build():
        return
    try:
        from thor_spec.vllm_plugin.runner_kernels import SEAMS
    except ImportError as error:
        yield Check(name="kernels", level=Level.FAIL, detail=f"cannot be checked: {error}", remedy="Reinstall torch.")
        return
    moved = [problem for seam in SEAMS if (problem := seam.problem())]
    yield Check(
        name="kernels",
        level=Level.FAIL if moved else Level.OK,
        detail=moved[0] if moved else f"{len(SEAMS)} kernels of the runner run in torch instead of the interpreter",
    )


def _lock() -> Iterator[Check]:
    try:
        found = status()
    except ThorSpecError as error:
        what, _, remedy = str(error).partition(". ")
        yield Check(name="lock", level=Level.FAIL, detail=what, remedy=remedy)
        return
    holder = f"held by {found.holder.describe()}" if found.holder else "held"
    yield Check(name="lock", level=Level.OK, detail=f"{holder if found.held else 'free'} ({found.lock_dir})")
    if found.holder and found.holder.url:
        yield from prefix_cache.check(reasons.ask(found.holder.url))
