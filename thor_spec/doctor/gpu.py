"""Which CUDA device there is, asked in a child: a CUDA context costs memory, and NVML does not survive a fork."""

import json
import subprocess
import sys
from dataclasses import dataclass

PROBE_TIMEOUT_S = 20

# The driver's own library, so that the question needs no torch and gets an answer where torch is broken.
_PROBE = """
import ctypes, json, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    print(json.dumps(None)); sys.exit()
count, device = ctypes.c_int(), ctypes.c_int()
if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
    print(json.dumps(None)); sys.exit()
cuda.cuDeviceGet(ctypes.byref(device), 0)
name, major, minor = ctypes.create_string_buffer(128), ctypes.c_int(), ctypes.c_int()
cuda.cuDeviceGetName(name, 128, device)
cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
print(json.dumps([name.value.decode(), major.value, minor.value, count.value]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The first CUDA device of this machine."""

    name: str
    capability: tuple[int, int]
    count: int


def probe() -> Gpu | None:
    """Return the GPU, or None where there is none or its driver does not answer."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    if found is None:
        return None
    name, major, minor, count = found
    return Gpu(name=name, capability=(major, minor), count=count)
