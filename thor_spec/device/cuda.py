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
integrated, total = ctypes.c_int(), ctypes.c_size_t()
cuda.cuDeviceGetAttribute(ctypes.byref(integrated), 18, device)
cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
driver = ctypes.c_int()
cuda.cuDriverGetVersion(ctypes.byref(driver))
found = [name.value.decode(), major.value, minor.value, count.value, integrated.value, total.value, driver.value]
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The first CUDA device of this machine."""

    name: str
    capability: tuple[int, int]
    count: int
    integrated: bool = False
    """It shares the machine's memory."""
    total_bytes: int = 0
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA that its driver speaks."""


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
    name, major, minor, count, integrated, total, version = found
    return Gpu(
        name=name,
        capability=(major, minor),
        count=count,
        integrated=bool(integrated),
        total_bytes=total,
        cuda=(version // 1000, version % 1000 // 10),
    )
