"""Verification in closed form: all nodes of a request at once, in two launches.

With ``D[t, i] = exp(sum of log decays after i up to t)`` for ancestors i of t (t included), 0 elsewhere:

    A[t, i] = beta_t D[t, i] (k_t . k_i)          i strictly above t
    R = V - exp(gamma) (S0 k)                     gamma_t: sum of log decays from the root to t
    (I + A) U = beta R
    O = exp(gamma) (S0 q) + (D * (q . k)) U

What does not touch the state is solved once per value head (``wy_solve``): ``T = (I + A)^-1 beta`` and
``Y = (D * (q . k)) T``. Then each part of the state is read once and takes four products (``wy``):

    U = T R,    O = exp(gamma) (S0 q) + Y R

(the factor of q, ``scale``, is left out of Y and comes last: entries of T and Y are at most 1 that way.)

There everything is held transposed, [BV, nodes]: the state [BV, BK] is then the left operand as it lies in memory. Keys
and queries are multiplied as they came and normalized afterwards, so that bfloat16 ones are exact operands.
"""

import triton
import triton.language as tl

from thor_spec.kernels.gdn_common.kernel import (
    dot_exact,
    dot_of_inputs,
    dot_small,
    fold_rows_by_product,
    fold_sixteen,
    load_sixteen,
    log_decay,
    powers,
    wrap,
)


@triton.jit
def _inverse_of_blocks(A):
    """Return the inverses of I + A for strictly lower A [B, 16, 16], by forward substitution in float32.

    Squaring instead would need few products only, but powers of A grow like binomials where keys repeat.
    """
    o_i = tl.arange(0, 16)
    row, column = o_i[None, :, None], o_i[None, None, :]
    T = tl.where(row == column, tl.full(A.shape, 1.0, tl.float32), 0.0)
    for i in range(15):
        below = tl.sum(tl.where(column == i, A, 0.0), axis=2)
        done = tl.sum(tl.where(row == i, T, 0.0), axis=1)
        T -= below[:, :, None] * done[:, None, :]
    return T


@triton.jit
def _inverse(A, BW: tl.constexpr, TF32: tl.constexpr, WIDEN: tl.constexpr):
    """Return the inverse of I + A for strictly lower A [BW, BW].

    With X the inverse of the diagonal blocks and L what is below them, ``M = X L`` has no power from the fourth on, and
    ``(I + A)^-1 = (I + M)^-1 X = (I - M + M^2 - M^3) X``. X took in what repeated keys would blow up.
    """
    BLOCKS: tl.constexpr = BW // 16
    if BLOCKS == 1:
        X = tl.reshape(_inverse_of_blocks(tl.reshape(A, [1, 16, 16])), [16, 16])
    else:
        blocks = tl.reshape(A, [BLOCKS, 16, BLOCKS, 16])
        o_b = tl.arange(0, BLOCKS)
        diagonal = o_b[:, None, None, None] == o_b[None, None, :, None]
        X = _inverse_of_blocks(tl.sum(tl.where(diagonal, blocks, 0.0), axis=2))
        X = tl.reshape(tl.where(diagonal, X[:, :, None, :], 0.0), [BW, BW])
        nothing = tl.zeros([BW, BW], dtype=tl.float32)
        M = dot_small(X, tl.reshape(tl.where(diagonal, 0.0, blocks), [BW, BW]), nothing, TF32, WIDEN)
        X -= dot_small(M, X, nothing, TF32, WIDEN)
        if BLOCKS > 2:
            square = dot_small(M, M, nothing, TF32, WIDEN)
            X = dot_small(square, X, X, TF32, WIDEN)  # (I + M^2) (I - M) X
    return X


@triton.jit
def _path_masks(masks, t, count, CHAIN: tl.constexpr):
    """Return the ancestor masks of nodes ``t``; 0 for those that are not there."""
    if CHAIN:
        mask = tl.where(t < count, (tl.full(t.shape, 2, tl.int64) << t.to(tl.int64)) - 1, 0)
    else:
        mask = tl.load(masks + t, mask=t < count, other=0)
    return mask


@triton.jit
def _path_sums(mask, t, g):
    """Return the sum of log decays from the root to each node, as multiples of 1/64 and the rest.

    The difference of two such sums is what enters, and in one float32 it would lose the digits of short paths below
    long ones. 64ths of a nat add and subtract exactly (up to 2^18 nats; e^-1024 is 0 in any case); the rest stays below
    half a nat.
    """
    g = tl.maximum(g, -1024.0)
    coarse = tl.floor(g * 64.0 + 0.5) * 0.015625
    on_path = ((mask[:, None] >> t[None, :].to(tl.int64)) & 1) != 0
    return (
        tl.sum(tl.where(on_path, coarse[None, :], 0.0), axis=1),
        tl.sum(tl.where(on_path, (g - coarse)[None, :], 0.0), axis=1),
    )


@triton.jit
def _decay_between(mask, t, coarse, fine):
    """Return D[t, i]; masked before the exponential, which would overflow across branches."""
    on_path = ((mask[:, None] >> t[None, :].to(tl.int64)) & 1) != 0
    exponent = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    return tl.exp(tl.where(on_path, exponent, float("-inf")))


@triton.jit
def _rows(x, token, stride, i_h, o_k, there, K: tl.constexpr):
    return tl.load(
        x + token[:, None] * stride + i_h * K + o_k[None, :], mask=there[:, None] & (o_k < K)[None, :], other=0.0
    )


@triton.jit
def _norm(x, there, L2_NORM: tl.constexpr):
    """Return the factor that normalizes each row."""
    if L2_NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6)
    else:
        scale = tl.where(there, 1.0, 0.0)
    return scale


@triton.jit(do_not_specialize=["width", "rows"])
def wy_solve(q, k, a, b, A_log, dt_bias, state_indices, cu_nodes, masks, rec_k, rec_scale, rec_g, start_row, pending,
             record_indices, solution, factors, scale, width, rows, q_stride, k_stride,
             H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
             CHAIN: tl.constexpr, DEFERRED: tl.constexpr, DELTA: tl.constexpr, HAS_BETA: tl.constexpr,
             L2_NORM: tl.constexpr, TF32: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Write one value head's T and Y [BW, BW] and factors [BW] of S0 k and S0 q; keys and decays to the record."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    i_hv, i_r = tl.program_id(0), tl.program_id(1)
    i_h = i_hv // (HV // H)
    slot = tl.load(state_indices + i_r)
    bos = tl.load(cu_nodes + i_r).to(tl.int64)
    end = tl.load(cu_nodes + i_r + 1)
    rec = tl.load(record_indices + i_r).to(tl.int64)
    count = tl.minimum((end - bos).to(tl.int32), width)
    if (slot <= 0) | (count <= 0):
        return
    offset = 0
    if DEFERRED:
        offset = wrap(tl.load(start_row + rec) + tl.load(pending + rec), rows)
    if not CHAIN:
        masks += i_r * width
    o_k, t = tl.arange(0, BK), tl.arange(0, BW)
    there = t < count
    token, row = bos + t, rec * rows + wrap(offset + t, rows)
    b_k = _rows(k, token, k_stride, i_h, o_k, there, K)
    b_q = _rows(q, token, q_stride, i_h, o_k, there, K)
    A_head, bias = tl.load(A_log + i_hv).to(tl.float32), tl.load(dt_bias + i_hv).to(tl.float32)
    g = log_decay(tl.load(a + token * HV + i_hv, mask=there, other=0.0).to(tl.float32) + bias, A_head)
    beta = tl.where(there, 1.0, 0.0)
    if HAS_BETA:
        beta = tl.sigmoid(tl.load(b + token * HV + i_hv, mask=there, other=0.0).to(tl.float32))
    k_scale = _norm(b_k, there, L2_NORM)
    q_scale = _norm(b_q, there, L2_NORM)
    if i_hv % (HV // H) == 0:
        in_k = there[:, None] & (o_k < K)[None, :]
        tl.store(rec_k + (row[:, None] * H + i_h) * K + o_k[None, :], b_k, mask=in_k)
        tl.store(rec_scale + row * H + i_h, k_scale, mask=there)
    tl.store(rec_g + row * HV + i_hv, g, mask=there)

    mask = _path_masks(masks, t, count, CHAIN)
    coarse, fine = _path_sums(mask, t, g)
    D = _decay_between(mask, t, coarse, fine) * k_scale[None, :]
    seen = dot_of_inputs(b_q, b_k, WIDEN) * D * q_scale[:, None]
    if DELTA:
        A = dot_of_inputs(b_k, b_k, WIDEN) * D * (beta * k_scale)[:, None]
        X = _inverse(tl.where(t[:, None] == t[None, :], 0.0, A), BW, TF32, WIDEN)
        seen = dot_small(seen, X, tl.zeros([BW, BW], dtype=tl.float32), TF32, WIDEN)
    else:
        X = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    head = (i_r * HV + i_hv).to(tl.int64)
    p = solution + head * 2 * BW * BW + t[:, None] * BW + t[None, :]
    tl.store(p, X * beta[None, :])
    tl.store(p + BW * BW, seen * beta[None, :])
    fade = tl.exp(coarse + fine)
    tl.store(factors + head * 2 * BW + t, fade * k_scale)
    tl.store(factors + (head * 2 + 1) * BW + t, fade * (q_scale * scale))


@triton.jit(do_not_specialize=["width", "rows"])
def wy(q, k, v, state, out, state_indices, cu_nodes, rec_k, rec_scale, rec_u, rec_g, start_row, pending, flush,
       record_indices, solution, factors, scale, width, rows, q_stride, k_stride, v_stride, STATE_STRIDE: tl.constexpr,
       H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
       BW: tl.constexpr, DEFERRED: tl.constexpr, DELTA: tl.constexpr, PARTS: tl.constexpr,
       TF32: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Read BV rows of one head's state; write outputs and pseudo-values of all nodes."""
    i_v, i_hv, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_h = i_hv // (HV // H)
    # Asked for together: a branch in between would wait for each.
    slot = tl.load(state_indices + i_r).to(tl.int64)
    bos = tl.load(cu_nodes + i_r).to(tl.int64)
    end = tl.load(cu_nodes + i_r + 1)
    rec = tl.load(record_indices + i_r).to(tl.int64)
    count = tl.minimum((end - bos).to(tl.int32), width)
    if (slot <= 0) | (count <= 0):
        return
    slab = rec * rows
    offset = 0
    if DEFERRED:
        offset = tl.load(start_row + rec)
        kept = tl.load(pending + rec)
        due = tl.load(flush + rec) != 0
    # Everything is asked for before anything is computed: few programs fit a multiprocessor, so that one which waited
    # for each load in turn would leave the memory idle.
    o_k, t = tl.arange(0, BK), tl.arange(0, BW)
    o_v = i_v * BV + tl.arange(0, BV)
    in_v = o_v < V
    p_h = state + slot * STATE_STRIDE + i_hv * V * K + o_v[:, None] * K + o_k[None, :]
    inside = in_v[:, None] & (o_k < K)[None, :]
    WHOLE: tl.constexpr = (K == BK) and (V % BV == 0)
    if WHOLE:
        h = tl.load(p_h).to(tl.float32)
    else:
        h = tl.load(p_h, mask=inside, other=0).to(tl.float32)
    there = t < count
    token = bos + t
    b_q = _rows(q, token, q_stride, i_h, o_k, there, K)
    b_k = b_q
    if DELTA:
        b_k = _rows(k, token, k_stride, i_h, o_k, there, K)
    if DEFERRED:
        row_g, row_scale, row_k, row_u = load_sixteen(0, slab, rows, offset, kept, pending, rec_k, rec_scale, rec_u,
                                                      rec_g, i_h, i_hv, o_k, o_v, H, HV, K, V, False)  # fmt: skip
    if DEFERRED:
        h = fold_sixteen(h, row_g, row_scale, row_k, row_u, WIDEN)
        h = fold_rows_by_product(h, 16, slab, rows, offset, kept, pending, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv,
                                 o_k, o_v, H, HV, K, V, False, WIDEN)  # fmt: skip
        if (kept > 0) & due:
            rounded = h.to(state.dtype.element_ty)
            if WHOLE:
                tl.store(p_h, rounded)
            else:
                tl.store(p_h, rounded, mask=inside)
            h = rounded.to(tl.float32)  # a state of less than float32 is what the next token would read
        offset = wrap(offset + kept, rows)

    out_t = in_v[:, None] & there[None, :]
    r = tl.load(v + token[None, :] * v_stride + i_hv * V + o_v[:, None], mask=out_t, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # only from here on is the solution needed
    head = (i_r * HV + i_hv).to(tl.int64)
    fade_k, fade_q = tl.load(factors + head * 2 * BW + t), tl.load(factors + (head * 2 + 1) * BW + t)
    p = solution + head * 2 * BW * BW + t[None, :] * BW + t[:, None]  # transposed
    AHEAD: tl.constexpr = BW == 16  # larger ones would take the registers
    if AHEAD:
        T, Y = tl.load(p), tl.load(p + BW * BW)
    nothing = tl.zeros([BV, BW], dtype=tl.float32)
    if DELTA:
        r -= dot_exact(h, tl.trans(b_k), nothing, PARTS, WIDEN) * fade_k[None, :]
    size, inverse = powers(r)
    r *= inverse[:, None]  # exactly; T and Y have no entries above 1 where keys and queries are normalized
    o = dot_exact(h, tl.trans(b_q), nothing, PARTS, WIDEN) * fade_q[None, :]
    if not AHEAD:
        T = tl.load(p)
    u = dot_small(r, T, nothing, TF32, WIDEN) * size[:, None]
    row = slab + wrap(offset + t, rows)
    tl.store(rec_u + (row[None, :] * HV + i_hv) * V + o_v[:, None], u, mask=out_t)
    if not AHEAD:
        Y = tl.load(p + BW * BW)
    o += dot_small(r, Y, nothing, TF32, WIDEN) * (size * scale)[:, None]
    tl.store(out + (token[None, :] * HV + i_hv) * V + o_v[:, None], o.to(out.dtype.element_ty), mask=out_t)
