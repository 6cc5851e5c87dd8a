"""Whether the assembler that Triton really takes knows the GPU.

For capability 10.0 and above Triton takes ``ptxas-blackwell``, a later one ``ptxas-thor``, and leaves
``TRITON_PTXAS_PATH`` aside without a word (triton#10331, triton#10462). So it is asked, and its choice is tried out.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from thor_spec import env
from thor_spec.device.board import Kind
from thor_spec.device.machine import Machine
from thor_spec.doctor.report import Check, Level

VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_THOR_PATH")
TIMEOUT_S = 60
_ASK = """
import sys
from triton.backends.nvidia import compiler
try:
    print(compiler.get_ptxas(int(sys.argv[1])).path)
except TypeError:
    print(compiler.get_ptxas().path)
"""
_PTX_VERSION = {110: "9.0", 121: "8.8", 103: "8.8", 100: "8.6", 120: "8.7"}


def check(machine: Machine) -> Iterator[Check]:
    """Yield whether Triton can compile for this GPU; nothing where there is none, or nothing can be tried out."""
    capability = (11, 0) if machine.board.kind is Kind.THOR else machine.gpu.capability if machine.gpu else None
    if not machine.live or capability is None:
        return
    number = capability[0] * 10 + capability[1]
    target = f"sm_{number}a" if number >= 90 else f"sm_{number}"
    path = chosen(number)
    if path is None:
        yield Check(
            name="ptxas", level=Level.WARN, detail="Triton does not say which it takes", remedy="Reinstall triton."
        )
        return
    said = assemble(path, target, _PTX_VERSION.get(number, "8.0"))
    if not said:
        yield Check(name="ptxas", level=Level.OK, detail=f"{path} assembles {target}")
        return
    given = [name for name in VARIABLES if env.engine_variable(name)]
    yield Check(
        name="ptxas",
        level=Level.FAIL,
        detail=f"{path}, which Triton takes, does not assemble {target}: {said}",
        remedy=f"Point {', '.join(VARIABLES)}, all three, at the ptxas of CUDA 13.0 or newer"
        f" (set now: {', '.join(given) or 'none'}).",
    )


def chosen(number: int) -> Path | None:
    """Return the assembler that Triton takes for a capability such as 110; None where it does not say."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK, str(number)], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    path = done.stdout.strip()
    return Path(path) if path else None


def assemble(ptxas: Path, target: str, ptx_version: str) -> str:
    """Assemble an empty kernel; return what went wrong, in a line, or nothing."""
    text = f".version {ptx_version}\n.target {target}\n.address_size 64\n.visible .entry empty() {{ ret; }}\n"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.ptx"
        source.write_text(text, encoding="ascii")
        argv = [str(ptxas), f"--gpu-name={target}", str(source), "-o", str(source.with_suffix(".cubin"))]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
    return "" if done.returncode == 0 else " ".join((done.stderr or done.stdout).split())[:200] or "it failed"
