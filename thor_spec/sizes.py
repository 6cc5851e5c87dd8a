"""Sizes as people write them."""

import re

SIZES = ("max_request_bytes", "kv_cache_memory", "memory_floor")
"""Options of ``thor-spec serve`` that are sizes."""
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}ib": 1 << 10 * (i + 1) for i, prefix in enumerate("kmgt")}
_UNITS |= {f"{prefix}b": 1000 ** (i + 1) for i, prefix in enumerate("kmgt")}


def parse_size(text: str) -> int:
    """Return the bytes of ``80GiB``, ``1.5 GB`` or ``1024``. Raises: ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 80GiB, 1.5GB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])
