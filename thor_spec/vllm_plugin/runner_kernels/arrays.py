"""How the replacements see what a kernel is launched with: tensors, and addresses, as numpy arrays.

numpy rather than torch: the arrays are small, where its calls cost less, and Triton's interpreter computes in it, so
that transcendental functions give the same bits.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from thor_spec.errors import ConfigError

Replaces = dict[str, tuple[Callable[..., None], ...]]
"""Upstream module -> the replacements of its kernels."""


def launchable(kernel: Callable[..., None]) -> Callable[..., None]:
    """Let ``kernel`` be launched with ``num_warps``, which vLLM forwards with the arguments; keep its signature."""

    @functools.wraps(kernel)
    def launch(*args: Any, **kwargs: Any) -> None:
        kwargs.pop("num_warps", None)
        kernel(*args, **kwargs)

    return launch


def flat(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a writable 1-D view of ``tensor``, as a kernel sees a pointer. Raises: RuntimeError, if it has gaps."""
    view: NDArray[Any] = tensor.view(-1).numpy()
    return view


def floats(tensor: torch.Tensor) -> NDArray[np.float32]:
    """Return ``tensor`` in float32; a copy unless it is float32 already. numpy knows no bfloat16."""
    array: NDArray[np.float32] = tensor.float().numpy()
    return array


def int32_at(address: int, count: int) -> NDArray[np.int32]:
    """Return a writable view of ``count`` int32 at ``address``; the caller vouches for the memory."""
    return np.ndarray(count, dtype=np.int32, buffer=memoryview((ctypes.c_int32 * count).from_address(address)))


def leading(mask: NDArray[np.bool_]) -> int:
    """Return how many elements precede the first False."""
    return len(mask) if mask.all() else int(mask.argmin())


def bits(words: NDArray[np.int32], count: int) -> NDArray[np.bool_]:
    """Return the first ``count`` bits of each row of ``words`` [n, words], the lowest first."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    return np.unpackbits(packed, axis=-1, count=count, bitorder="little").astype(np.bool_)


def in_blocks(rows: NDArray[Any], block_size: int) -> NDArray[Any]:
    """Return ``rows`` [n, v] as [n, ceil(v / block_size), block_size], padded with -inf; one block stays unpadded."""
    n, width = rows.shape
    if width <= block_size:
        return rows[:, None, :]
    num_blocks = -(-width // block_size)
    padded = np.full((n, num_blocks * block_size), -np.inf, dtype=rows.dtype)
    padded[:, :width] = rows
    return padded.reshape(n, num_blocks, block_size)


def max_and_argmax(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the maximum along the last axis and where it first stands, passing over NaN."""
    largest = rows.max(axis=-1)
    if np.isnan(largest).any():
        rows = np.where(np.isnan(rows), -np.inf, rows)
        largest = rows.max(axis=-1)
    return largest, rows.argmax(axis=-1)


def require_one_rank(cp_size: int) -> None:
    """Raise ConfigError under context parallelism, which has no place on a machine without GPUs."""
    if cp_size != 1:
        raise ConfigError(
            f"Context parallelism over {cp_size} ranks is not replaced in torch. "
            "Run with one rank, or with thor_spec.runner_kernels=triton."
        )
