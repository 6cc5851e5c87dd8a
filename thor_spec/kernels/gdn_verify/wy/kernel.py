"""Verification in closed form: products over all nodes at once and one unit triangular solve.

With ``D[t, i] = exp(sum of log decays after i up to t)`` for ancestors i of t (t included), 0 elsewhere:

    A[t, i] = beta_t D[t, i] (k_t . k_i)          i strictly above t
    (I + A) U = beta (V - exp(gamma) (S0 k))       gamma_t: sum of log decays from the root to t
    O = exp(gamma) (S0 q) + (D * (q . k)) U

Everything is held transposed, [BV, nodes]: the state [BV, BK] is then the left operand as it lies in memory. Keys and
queries are multiplied as they came and normalized afterwards, so that bfloat16 ones are exact operands.
"""

import triton
import triton.language as tl

from thor_spec.kernels.gdn_common.kernel import dot_exact, fold_rows_by_product, log_decay


@triton.jit
def _small_dot(x, y, WIDEN: tl.constexpr):
    """Return ``x @ y^T``, nodes by nodes, for keys or queries as they came."""
    if x.dtype == tl.bfloat16:
        if WIDEN:
            z = tl.dot(x.to(tl.float32), tl.trans(y.to(tl.float32)), input_precision="ieee")
        else:
            z = tl.dot(x, tl.trans(y))
    else:
        z = tl.dot(x.to(tl.float32), tl.trans(y.to(tl.float32)), input_precision="tf32x3")
    return z


@triton.jit
def _inverse_of_diagonal_blocks(A, BT: tl.constexpr):
    """Return the inverses of the 16 x 16 diagonal blocks of I + A, for strictly lower A, in their places.

    Forward substitution in float32, all blocks side by side. Squaring instead would need four products only, but powers
    of A grow like binomials where keys repeat.
    """
    BLOCKS: tl.constexpr = BT // 16
    o_t = tl.arange(0, BT)
    own = (o_t // 16)[:, None, None] == tl.arange(0, BLOCKS)[None, :, None]
    L = tl.sum(tl.where(own, tl.reshape(A, [BT, BLOCKS, 16]), 0.0), axis=1)
    L = tl.reshape(L, [BLOCKS, 16, 16])
    o_i = tl.arange(0, 16)
    row, column = o_i[None, :, None], o_i[None, None, :]
    T = tl.where(row == column, 1.0, 0.0) + tl.zeros([BLOCKS, 16, 16], dtype=tl.float32)
    for i in range(15):
        below = tl.sum(tl.where(column == i, L, 0.0), axis=2)
        done = tl.sum(tl.where(row == i, T, 0.0), axis=1)
        T -= below[:, :, None] * done[:, None, :]
    spread = tl.where(own, tl.reshape(T, [BT, 16])[:, None, :], 0.0)
    return tl.reshape(spread, [BT, BT])


@triton.jit
def wy(q, k, v, a, b, A_log, dt_bias, state, out, state_indices, cu_nodes, masks, leaves,
       rec_k, rec_scale, rec_u, rec_g, pending, flush, record_indices, scale,
       Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, STATE_STRIDE: tl.constexpr,
       H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
       WIDTH: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr, CHAIN: tl.constexpr, DEFERRED: tl.constexpr,
       DELTA: tl.constexpr, HAS_BETA: tl.constexpr, L2_NORM: tl.constexpr,
       PARTS: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    i_v, i_hv, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_h = i_hv // (HV // H)
    slot = tl.load(state_indices + i_r).to(tl.int64)
    if slot <= 0:
        return
    bos = tl.load(cu_nodes + i_r).to(tl.int64)
    count = tl.minimum((tl.load(cu_nodes + i_r + 1) - bos).to(tl.int32), WIDTH)
    if count <= 0:
        return
    rec = tl.load(record_indices + i_r).to(tl.int64)
    first = rec * ROWS
    o_k, o_t = tl.arange(0, BK), tl.arange(0, BT)
    o_v = i_v * BV + tl.arange(0, BV)
    in_k, in_v, in_t = o_k < K, o_v < V, o_t < count
    token = bos + o_t

    p_h = state + slot * STATE_STRIDE + i_hv * V * K + o_v[:, None] * K + o_k[None, :]
    inside = in_v[:, None] & in_k[None, :]
    h = tl.load(p_h, mask=inside, other=0).to(tl.float32)
    nodes = in_t[:, None] & in_k[None, :]
    b_k = tl.load(k + token[:, None] * K_STRIDE + i_h * K + o_k[None, :], mask=nodes, other=0.0)
    b_q = tl.load(q + token[:, None] * Q_STRIDE + i_h * K + o_k[None, :], mask=nodes, other=0.0)

    if DEFERRED:
        kept = tl.load(pending + rec)
        h = fold_rows_by_product(h, first, kept, pending, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
                                 H, HV, K, V, False, WIDEN)  # fmt: skip
        if (kept > 0) & (tl.load(flush + rec) != 0):
            rounded = h.to(state.dtype.element_ty)
            tl.store(p_h, rounded, mask=inside)
            h = rounded.to(tl.float32)  # a state of less than float32 is what the next token would read
        first += kept

    x = tl.load(a + token * HV + i_hv, mask=in_t, other=0.0).to(tl.float32) + tl.load(dt_bias + i_hv).to(tl.float32)
    g = tl.where(in_t, log_decay(x, tl.load(A_log + i_hv).to(tl.float32)), 0.0)
    beta = tl.where(in_t, 1.0, 0.0)
    if HAS_BETA:
        beta = tl.where(in_t, tl.sigmoid(tl.load(b + token * HV + i_hv, mask=in_t, other=0.0).to(tl.float32)), 0.0)
    k_scale = tl.where(in_t, 1.0, 0.0)
    q_scale = k_scale * scale
    if L2_NORM:
        wide_k, wide_q = b_k.to(tl.float32), b_q.to(tl.float32)
        k_scale = tl.rsqrt(tl.sum(wide_k * wide_k, axis=1) + 1e-6)
        q_scale = tl.rsqrt(tl.sum(wide_q * wide_q, axis=1) + 1e-6) * scale

    if CHAIN:
        above = (o_t[:, None] >= o_t[None, :]) & in_t[:, None]
    else:
        mask = tl.load(masks + i_r * WIDTH + o_t, mask=in_t, other=0)
        above = ((mask[:, None] >> o_t[None, :].to(tl.int64)) & 1) != 0
    strictly = above & (o_t[:, None] != o_t[None, :])
    # gamma_t - gamma_i would lose the digits of short paths below long ones. A decay in 64ths of a nat sums and
    # subtracts exactly (up to 2^18 nats; e^-1024 is 0 in any case); the rest stays below half a nat.
    coarse = tl.floor(tl.maximum(g, -1024.0) * 64.0 + 0.5) * 0.015625
    fine = tl.maximum(g, -1024.0) - coarse
    coarse = tl.sum(tl.where(above, coarse[None, :], 0.0), axis=1)
    fine = tl.sum(tl.where(above, fine[None, :], 0.0), axis=1)
    between = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    D = tl.exp(tl.where(above, between, float("-inf"))) * k_scale[None, :]  # across branches exp would overflow
    fade = tl.exp(coarse + fine)

    p_v = v + token[None, :] * V_STRIDE + i_hv * V + o_v[:, None]
    u = tl.load(p_v, mask=in_v[:, None] & in_t[None, :], other=0.0).to(tl.float32)
    nothing = tl.zeros([BV, BT], dtype=tl.float32)
    if DELTA:
        A = tl.where(strictly, _small_dot(b_k, b_k, WIDEN) * D * (beta * k_scale)[:, None], 0.0)
        recalled = dot_exact(h, tl.trans(b_k), nothing, PARTS, WIDEN)
        u = (u - recalled * (fade * k_scale)[None, :]) * beta[None, :]
        T = _inverse_of_diagonal_blocks(A, BT)
        u = tl.dot(u, tl.trans(T), input_precision="tf32x3")
        if BT > 16:  # I + A = T^-1 (I + N) with N nilpotent on blocks: exact after BT / 16 - 1 rounds
            same = (o_t // 16)[:, None] == (o_t // 16)[None, :]
            N = tl.trans(tl.dot(T, tl.where(same, 0.0, A), input_precision="tf32x3"))
            solved = u
            for _ in tl.static_range(BT // 16 - 1):
                solved = u - tl.dot(solved, N, input_precision="tf32x3")
            u = solved
    else:
        u = u * beta[None, :]

    row = first + o_t
    tl.store(rec_u + (row[None, :] * HV + i_hv) * V + o_v[:, None], u, mask=in_v[:, None] & in_t[None, :])
    if i_v == 0:
        tl.store(rec_g + row * HV + i_hv, g, mask=in_t)
        if i_hv % (HV // H) == 0:
            tl.store(rec_k + (row[:, None] * H + i_h) * K + o_k[None, :], b_k, mask=nodes)
            tl.store(rec_scale + row * H + i_h, k_scale, mask=in_t)

    o = dot_exact(h, tl.trans(b_q), nothing, PARTS, WIDEN) * (fade * q_scale)[None, :]
    seen = tl.where(above, _small_dot(b_q, b_k, WIDEN) * D * q_scale[:, None], 0.0)
    o = tl.dot(u, tl.trans(seen), acc=o, input_precision="tf32x3")
    p_o = out + (token[None, :] * HV + i_hv) * V + o_v[:, None]
    tl.store(p_o, o.to(out.dtype.element_ty), mask=in_v[:, None] & in_t[None, :])
