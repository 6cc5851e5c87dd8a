"""Whether the assembler that Triton really takes knows the GPU, and one of CUDA's that does where it does not.

For capability 10.0 and above Triton takes ``ptxas-blackwell``, a later one ``ptxas-thor``, and leaves
``TRITON_PTXAS_PATH`` aside without a word (triton#10331, triton#10462). So it is asked, and its choice is tried out.
What Triton 3.6 brings is of CUDA 12.9, which does not know ``sm_110a``.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from thor_spec import env
from thor_spec.device.board import Kind
from thor_spec.errors import PlatformError

VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_THOR_PATH")
REMEDY = f"Point {', '.join(VARIABLES)}, all three, at the ptxas of CUDA 13.0 or newer."
THOR = 110
TIMEOUT_S = 60
_CUDA = Path("/usr/local/cuda")
_ASK = """
import sys
from triton.backends.nvidia import compiler
try:
    print(compiler.get_ptxas(int(sys.argv[1])).path)
except TypeError:
    print(compiler.get_ptxas().path)
"""
_PTX_VERSION = {THOR: "9.0", 121: "8.8", 103: "8.8", 100: "8.6", 120: "8.7"}


def variables_for(
    kind: Kind, given: Mapping[str, str] | None = None, note: Callable[[str], None] | None = None
) -> dict[str, str]:
    """Return the variables with which Triton compiles for this board; none where it does without.

    Only a Thor is looked at: other boards are known to every assembler of our time.

    Args:
        given: variables that the process gets besides those it inherits.
        note: told when another assembler is taken than Triton would take.

    Raises: PlatformError, where neither Triton's choice nor one of CUDA's knows the board.
    """
    if kind is not Kind.THOR or (path := chosen(THOR, given)) is None or not (said := complaint(path, THOR)):
        return {}
    if (other := alternative(THOR, given)) is None:
        raise PlatformError(f"{path}, which Triton takes, does not assemble {target(THOR)}: {said}. {REMEDY}")
    if note:
        note(f"note: {path}, which Triton would take, does not know this GPU; it is given {other}.")
    return dict.fromkeys(VARIABLES, str(other))


def target(number: int) -> str:
    """Return the assembler's name of a capability such as 110."""
    return f"sm_{number}a" if number >= 90 else f"sm_{number}"


def chosen(number: int, given: Mapping[str, str] | None = None) -> Path | None:
    """Return the assembler that Triton takes for a capability such as 110; None where it does not say."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK, str(number)],
            env=env.child_environment(given or {}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    path = done.stdout.strip()
    return Path(path) if path else None


def alternative(number: int, given: Mapping[str, str] | None = None) -> Path | None:
    """Return an assembler that knows the capability: one that a variable names, or CUDA's; None where none does."""
    known = given or {}
    named = [known.get(name) or env.engine_variable(name) for name in VARIABLES]
    home = known.get("CUDA_HOME") or env.engine_variable("CUDA_HOME")
    found = [*named, f"{home}/bin/ptxas" if home else None, shutil.which("ptxas"), str(_CUDA / "bin" / "ptxas")]
    paths = (Path(path) for path in dict.fromkeys(found) if path)
    return next((path for path in paths if path.is_file() and not complaint(path, number)), None)


def complaint(ptxas: Path, number: int) -> str:
    """Assemble an empty kernel for a capability; return what went wrong, in a line, or nothing."""
    name, version = target(number), _PTX_VERSION.get(number, "8.0")
    text = f".version {version}\n.target {name}\n.address_size 64\n.visible .entry empty() {{ ret; }}\n"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.ptx"
        source.write_text(text, encoding="ascii")
        argv = [str(ptxas), f"--gpu-name={name}", str(source), "-o", str(source.with_suffix(".cubin"))]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
    return "" if done.returncode == 0 else " ".join((done.stderr or done.stdout).split())[:200] or "it failed"
