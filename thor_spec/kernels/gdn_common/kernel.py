"""Triton pieces that verification and commit share. Tiles are [BV, BK], the state's own layout [V, K].

Bit-identity with one-token decoding rests on two rules here. A sum over K sees the same products in the same tile
layout as vLLM's kernel, and what happens to the state is one multiplication and one fused multiply-add: an explicit
``fma``, because a compiler that may choose would fuse ``h * alpha`` instead where that product has no other use.
"""

import triton
import triton.language as tl


@triton.jit
def log_decay(x, A_log):
    """Return ``-exp(A_log) * softplus(x)``; softplus is linear above 20, as vLLM has it."""
    softplus = tl.where(x <= 20.0, tl.log(1 + tl.exp(x)), x)
    return -tl.exp(A_log) * softplus


@triton.jit
def lowest_node(mask):
    """Return the index of the lowest set bit of a 64-bit word: a power of two is its own float exponent."""
    low = (mask & -mask).to(tl.uint64).to(tl.float32)
    return ((low.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def wrap(offset, rows):
    """Return the row of a ring at ``offset`` from its beginning, for offsets below two rounds."""
    return tl.where(offset >= rows, offset - rows, offset)


@triton.jit
def load_row(row, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
             H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
             PER_CHANNEL: tl.constexpr):  # fmt: skip
    """Return normalized key [BK], pseudo-value [BV] and decay factor (scalar or [BK]) of a record row."""
    k = tl.load(rec_k + (row * H + i_h) * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    k = k * tl.load(rec_scale + row * H + i_h)
    u = tl.load(rec_u + (row * HV + i_hv) * V + o_v, mask=o_v < V, other=0.0)
    if PER_CHANNEL:
        g = tl.load(rec_g + (row * HV + i_hv) * K + o_k, mask=o_k < K, other=0.0)
    else:
        g = tl.load(rec_g + row * HV + i_hv)
    return k, u, tl.exp(g)


@triton.jit
def decay(h, alpha, PER_CHANNEL: tl.constexpr):
    """Return the state after forgetting."""
    if PER_CHANNEL:
        faded = h * alpha[None, :]
    else:
        faded = h * alpha
    return faded


@triton.jit
def fold_rows(h, slab, rows, offset, count, path, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
              H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
              PER_CHANNEL: tl.constexpr, BY_PATH: tl.constexpr):  # fmt: skip
    """Return the state after ``count`` rows, one by one: those from ``offset`` on, or ``offset + path[i]``.

    The next row is loaded before the current one is used, so that a step costs arithmetic, not latency.
    """
    if count > 0:
        at = offset
        if BY_PATH:
            at = offset + tl.load(path)
        row = slab + wrap(at, rows)
        k, u, alpha = load_row(row, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v, H, HV, K, V, PER_CHANNEL)
        for i in range(count):
            ahead = tl.minimum(i + 1, count - 1)
            at = offset + ahead
            if BY_PATH:
                at = offset + tl.load(path + ahead)
            row = slab + wrap(at, rows)
            k_next, u_next, alpha_next = load_row(
                row, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v, H, HV, K, V, PER_CHANNEL
            )
            h = tl.fma(u[:, None], k[None, :], decay(h, alpha, PER_CHANNEL))
            k, u, alpha = k_next, u_next, alpha_next
    return h


@triton.jit
def _dot(x, y, acc, WIDEN: tl.constexpr):
    """Return ``acc + x @ y`` for operands of 16 bits. The interpreter must widen them (WIDEN), which is exact."""
    if WIDEN:
        z = tl.dot(x.to(tl.float32), y.to(tl.float32), acc=acc, input_precision="ieee")
    else:
        z = tl.dot(x, y, acc=acc)
    return z


@triton.jit
def _upper(x, LOST: tl.constexpr, NEAREST: tl.constexpr):
    """Return x without its last bits, by integer operations: conversions go through a slow unit."""
    bits = x.to(tl.int32, bitcast=True)
    if NEAREST:
        bits += 1 << (LOST - 1)
    return (bits & -(1 << LOST)).to(tl.float32, bitcast=True)


@triton.jit
def _split(x):
    """Return three bfloat16 parts, 24 bits together: as much as a float32 holds."""
    high = _upper(x, 16, False)
    rest = x - high
    middle = _upper(rest, 16, False)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def dot_exact(x, y, acc, PARTS: tl.constexpr, WIDEN: tl.constexpr):
    """Return ``acc + x @ y`` to float32 precision, for float32 ``x``; small terms first.

    For a bfloat16 ``y`` the products of the three parts are exact, and cost half of tf32x3. One part is enough where
    ``x`` was rounded to bfloat16 before (PARTS); two leave out what is below 2^-17. For a wider ``y`` six products
    leave out what is below 2^-24.
    """
    if y.dtype == tl.bfloat16:
        if PARTS == 1:
            acc = _dot(x.to(tl.bfloat16), y, acc, WIDEN)
        else:
            if PARTS == 2:
                nearest = _upper(x, 16, True)
                high, middle = nearest.to(tl.bfloat16), (x - nearest).to(tl.bfloat16)
            else:
                high, middle, low = _split(x)
                acc = _dot(low, y, acc, WIDEN)
            acc = _dot(middle, y, acc, WIDEN)
            acc = _dot(high, y, acc, WIDEN)
    else:
        high, middle, low = _split(x)
        y_high, y_middle, y_low = _split(y.to(tl.float32))
        acc = _dot(low, y_high, acc, WIDEN)
        acc = _dot(middle, y_middle, acc, WIDEN)
        acc = _dot(high, y_low, acc, WIDEN)
        acc = _dot(middle, y_high, acc, WIDEN)
        acc = _dot(high, y_middle, acc, WIDEN)
        acc = _dot(high, y_high, acc, WIDEN)
    return acc


@triton.jit
def _halves(x):
    """Return two float16 numbers, 22 bits together, for x of at most about 1: what is below 2^-25 is lost."""
    high = _upper(x, 13, True)
    return high.to(tl.float16), (x - high).to(tl.float16)


@triton.jit
def dot_small(x, y, acc, TF32: tl.constexpr, WIDEN: tl.constexpr):
    """Return ``acc + x @ y`` for float32 operands, by ``tf32x3`` or by three products of float16.

    Those are as exact where no entry exceeds about 1, take half the time, and need no transposed copy of ``y``.
    """
    if TF32:
        acc = tl.dot(x, y, acc=acc, input_precision="tf32x3")
    else:
        x_high, x_low = _halves(x)
        y_high, y_low = _halves(y)
        acc = _dot(x_low, y_high, acc, WIDEN)
        acc = _dot(x_high, y_low, acc, WIDEN)
        acc = _dot(x_high, y_high, acc, WIDEN)
    return acc


@triton.jit
def powers(x):
    """Return the power of two below each row's largest entry, and its inverse. Rows of zeros have 0 and 2^127."""
    bits = tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(bits, 0x7E800000)  # the inverse of more is no normal number
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def dot_of_inputs(x, y, WIDEN: tl.constexpr):
    """Return ``x @ y^T`` for keys or queries [16, BK] as they came; exact products for bfloat16 ones."""
    nothing = tl.zeros([x.shape[0], y.shape[0]], dtype=tl.float32)
    if x.dtype == tl.bfloat16:
        z = _dot(x, tl.trans(y), nothing, WIDEN)
    else:
        z = dot_exact(x.to(tl.float32), tl.trans(y), nothing, 3, WIDEN)
    return z


@triton.jit
def load_sixteen(start, slab, rows, offset, count, path, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
                 H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                 BY_PATH: tl.constexpr):  # fmt: skip
    """Return sixteen record rows from the ``start``-th of ``count`` on: log decays, scales, keys and pseudo-values."""
    o_i = start + tl.arange(0, 16)
    there = o_i < count
    at = offset + o_i
    if BY_PATH:
        at = offset + tl.load(path + o_i, mask=there, other=0)
    row = slab + wrap(at, rows)
    k = tl.load(
        rec_k + (row[:, None] * H + i_h) * K + o_k[None, :], mask=there[:, None] & (o_k < K)[None, :], other=0.0
    )
    u = tl.load(
        rec_u + (row[None, :] * HV + i_hv) * V + o_v[:, None], mask=there[None, :] & (o_v < V)[:, None], other=0.0
    )
    g = tl.load(rec_g + row * HV + i_hv, mask=there, other=0.0)
    scale = tl.load(rec_scale + row * H + i_h, mask=there, other=0.0)
    return g, scale, k, u


@triton.jit
def fold_sixteen(h, g, scale, k, u, WIDEN: tl.constexpr):
    """Return the state after sixteen rows, as one product; rows that are not there are zero.

    ``h = exp(g_1 + .. + g_n) h + sum_i exp(g_{i+1} + .. + g_n) u_i k_i^T``; the exponents are summed from the rows
    themselves, not subtracted from a running total, so long products lose no digits.
    """
    o_i = tl.arange(0, 16)
    after = tl.sum(tl.where(o_i[None, :] > o_i[:, None], g[None, :], 0.0), axis=1)
    h = h * tl.exp(tl.sum(g, axis=0))
    return dot_exact(u * (tl.exp(after) * scale)[None, :], k, h, 3, WIDEN)


@triton.jit
def fold_rows_by_product(h, first, slab, rows, offset, count, path, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k,
                         o_v, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                         BY_PATH: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """Return the state after the rows from the ``first``-th of ``count`` on, sixteen at a time."""
    for start in range(first, count, 16):
        g, scale, k, u = load_sixteen(start, slab, rows, offset, count, path, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv,
                                      o_k, o_v, H, HV, K, V, BY_PATH)  # fmt: skip
        h = fold_sixteen(h, g, scale, k, u, WIDEN)
    return h
