"""Triton function that other kernels call."""

import triton
import triton.language as tl


@triton.jit
def rounded(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return float32 ``x`` as ``dtype``, to the nearest, ties to even.

    Devices do so by themselves; the interpreter cuts a bfloat16 off.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)
