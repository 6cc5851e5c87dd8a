"""What PyTorch was built for and what it finds, asked in a child: a CUDA context costs memory."""

import ast
import re
from typing import NamedTuple

PROBE = """
import torch
print("torch", torch.__version__, "cuda", torch.version.cuda)
print("arch_list:", torch.cuda.get_arch_list())
if torch.cuda.is_available():
    print("device:", torch.cuda.get_device_name(0), "cap:", torch.cuda.get_device_capability(0))
"""


class TorchBuild(NamedTuple):
    """The answer; None where it does not say."""

    version: str | None = None
    cuda: str | None = None
    archs: tuple[str, ...] = ()
    device: str | None = None
    capability: tuple[int, int] | None = None


_VERSION = re.compile(r"^torch (\S+)(?: cuda (\S+))?", re.MULTILINE)
_ARCHS = re.compile(r"^arch_list: (\[[^\]\n]{0,2000}\])", re.MULTILINE)
_DEVICE = re.compile(r"^device: (.+?) cap: \((\d{1,3}), (\d{1,3})\)", re.ASCII | re.MULTILINE)


def parse(text: str) -> TorchBuild:
    """Return what the probe printed."""
    version, archs, device = (pattern.search(text) for pattern in (_VERSION, _ARCHS, _DEVICE))
    return TorchBuild(
        version=version[1] if version else None,
        cuda=version[2] if version and version[2] not in (None, "None") else None,
        archs=_strings(archs[1]) if archs else (),
        device=device[1] if device else None,
        capability=(int(device[2]), int(device[3])) if device else None,
    )


def _strings(text: str) -> tuple[str, ...]:
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ()
    return tuple(item for item in found if isinstance(item, str))


def covers(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Return whether code for one of ``archs`` runs on the capability: itself, the same major below, or PTX."""
    wanted = capability[0] * 10 + capability[1]
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d{2,3})([af]?)", arch, re.ASCII)
        if match is None:
            continue
        number = int(match[2])
        same_family = match[1] == "sm" and number // 10 == wanted // 10 and number <= wanted and not match[3]
        if number == wanted or same_family or (match[1] == "compute" and number <= wanted and not match[3]):
            return True
    return False
