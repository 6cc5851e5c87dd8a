"""Verification in closed form: products over sixteen nodes at once and a unit triangular solve.

With ``D[t, i] = exp(sum of log decays after i up to t)`` for ancestors i of t (t included), 0 elsewhere:

    A[t, i] = beta_t D[t, i] (k_t . k_i)          i strictly above t
    (I + A) U = beta (V - exp(gamma) (S0 k))       gamma_t: sum of log decays from the root to t
    O = exp(gamma) (S0 q) + (D * (q . k)) U

Nodes are taken sixteen at a time; the contribution of earlier ones is subtracted before the solve, read back from the
record that this program wrote. So work follows a request's own count, one compiled kernel serves 17 to 64 nodes, and
nothing spills.

Everything is held transposed, [BV, nodes]: the state [BV, BK] is then the left operand as it lies in memory. Keys and
queries are multiplied as they came and normalized afterwards, so that bfloat16 ones are exact operands.
"""

import triton
import triton.language as tl

from thor_spec.kernels.gdn_common.kernel import dot_exact, dot_of_inputs, fold_rows_by_product, log_decay, wrap


@triton.jit
def _inverse(A):
    """Return the inverse of I + A for strictly lower A [16, 16].

    Forward substitution in float32. Squaring instead would need four products only, but powers of A grow like binomials
    where keys repeat.
    """
    o_i = tl.arange(0, 16)
    row, column = o_i[:, None], o_i[None, :]
    T = tl.where(row == column, 1.0, 0.0)
    for i in range(15):
        below = tl.sum(tl.where(column == i, A, 0.0), axis=1)
        done = tl.sum(tl.where(row == i, T, 0.0), axis=0)
        T -= below[:, None] * done[None, :]
    return T


@triton.jit
def _path_masks(masks, t, count, CHAIN: tl.constexpr):
    """Return the ancestor masks of nodes ``t``; 0 for those that are not there."""
    if CHAIN:
        mask = tl.where(t < count, (tl.full(t.shape, 2, tl.int64) << t.to(tl.int64)) - 1, 0)
    else:
        mask = tl.load(masks + t, mask=t < count, other=0)
    return mask


@triton.jit
def _path_sums(mask, all_t, g):
    """Return the sum of log decays from the root to each node, as multiples of 1/64 and the rest.

    The difference of two such sums is what enters, and in one float32 it would lose the digits of short paths below
    long ones. 64ths of a nat add and subtract exactly (up to 2^18 nats; e^-1024 is 0 in any case); the rest stays below
    half a nat.
    """
    g = tl.maximum(g, -1024.0)
    coarse = tl.floor(g * 64.0 + 0.5) * 0.015625
    on_path = ((mask[:, None] >> all_t[None, :].to(tl.int64)) & 1) != 0
    return (
        tl.sum(tl.where(on_path, coarse[None, :], 0.0), axis=1),
        tl.sum(tl.where(on_path, (g - coarse)[None, :], 0.0), axis=1),
    )


@triton.jit
def _decay_between(mask, i, coarse, fine, coarse_i, fine_i):
    """Return D[t, i]; masked before the exponential, which would overflow across branches."""
    on_path = ((mask[:, None] >> i[None, :].to(tl.int64)) & 1) != 0
    exponent = (coarse[:, None] - coarse_i[None, :]) + (fine[:, None] - fine_i[None, :])
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
def wy(q, k, v, a, b, A_log, dt_bias, state, out, state_indices, cu_nodes, masks, leaves,
       rec_k, rec_scale, rec_u, rec_g, start_row, pending, flush, record_indices, scale, width, rows,
       q_stride, k_stride, v_stride, STATE_STRIDE: tl.constexpr,
       H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
       BW: tl.constexpr,
       CHAIN: tl.constexpr, DEFERRED: tl.constexpr, DELTA: tl.constexpr, HAS_BETA: tl.constexpr, L2_NORM: tl.constexpr,
       PARTS: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    i_v, i_hv, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_h = i_hv // (HV // H)
    slot = tl.load(state_indices + i_r).to(tl.int64)
    if slot <= 0:
        return
    bos = tl.load(cu_nodes + i_r).to(tl.int64)
    count = tl.minimum((tl.load(cu_nodes + i_r + 1) - bos).to(tl.int32), width)
    if count <= 0:
        return
    rec = tl.load(record_indices + i_r).to(tl.int64)
    slab = rec * rows
    offset = 0
    BT: tl.constexpr = 16
    o_k, o_t, all_t = tl.arange(0, BK), tl.arange(0, BT), tl.arange(0, BW)
    o_v = i_v * BV + tl.arange(0, BV)
    in_k, in_v = o_k < K, o_v < V
    if not CHAIN:
        masks += i_r * width

    p_h = state + slot * STATE_STRIDE + i_hv * V * K + o_v[:, None] * K + o_k[None, :]
    inside = in_v[:, None] & in_k[None, :]
    h = tl.load(p_h, mask=inside, other=0).to(tl.float32)
    if DEFERRED:
        offset = tl.load(start_row + rec)
        kept = tl.load(pending + rec)
        h = fold_rows_by_product(h, slab, rows, offset, kept, pending, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv,
                                 o_k, o_v, H, HV, K, V, False, WIDEN)  # fmt: skip
        if (kept > 0) & (tl.load(flush + rec) != 0):
            rounded = h.to(state.dtype.element_ty)
            tl.store(p_h, rounded, mask=inside)
            h = rounded.to(tl.float32)  # a state of less than float32 is what the next token would read
        offset = wrap(offset + kept, rows)

    A_head, bias = tl.load(A_log + i_hv).to(tl.float32), tl.load(dt_bias + i_hv).to(tl.float32)
    p_a = a + bos * HV + i_hv
    all_g = log_decay(tl.load(p_a + all_t * HV, mask=all_t < count, other=0.0).to(tl.float32) + bias, A_head)

    for start in range(0, count, BT):
        t = start + o_t
        there = t < count
        token, row = bos + t, slab + wrap(offset + t, rows)
        out_t = in_v[:, None] & there[None, :]
        b_k = _rows(k, token, k_stride, i_h, o_k, there, K)
        b_q = _rows(q, token, q_stride, i_h, o_k, there, K)
        k_scale = _norm(b_k, there, L2_NORM)
        q_scale = _norm(b_q, there, L2_NORM) * scale
        if (i_v == 0) & (i_hv % (HV // H) == 0):
            tl.store(rec_k + (row[:, None] * H + i_h) * K + o_k[None, :], b_k, mask=there[:, None] & in_k[None, :])
            tl.store(rec_scale + row * H + i_h, k_scale, mask=there)
        # What is wide comes first and dies early.
        nothing = tl.zeros([BV, BT], dtype=tl.float32)
        o = dot_exact(h, tl.trans(b_q), nothing, PARTS, WIDEN)
        if DELTA:
            recalled = dot_exact(h, tl.trans(b_k), nothing, PARTS, WIDEN)
            A = dot_of_inputs(b_k, b_k, WIDEN)
        seen = dot_of_inputs(b_q, b_k, WIDEN)

        g = log_decay(tl.load(p_a + t * HV, mask=there, other=0.0).to(tl.float32) + bias, A_head)
        if i_v == 0:
            tl.store(rec_g + row * HV + i_hv, g, mask=there)
        beta = tl.where(there, 1.0, 0.0)
        if HAS_BETA:
            beta = tl.sigmoid(tl.load(b + token * HV + i_hv, mask=there, other=0.0).to(tl.float32))
        mask = _path_masks(masks, t, count, CHAIN)
        coarse, fine = _path_sums(mask, all_t, all_g)
        D = _decay_between(mask, t, coarse, fine, coarse, fine) * k_scale[None, :]
        fade = tl.exp(coarse + fine)
        seen = seen * D * q_scale[:, None]
        o = o * (fade * q_scale)[None, :]
        p_v = v + token[None, :] * v_stride + i_hv * V + o_v[:, None]
        u = tl.load(p_v, mask=out_t, other=0.0).to(tl.float32)
        if DELTA:
            A = tl.where(o_t[:, None] == o_t[None, :], 0.0, A * D * (beta * k_scale)[:, None])
            u = u - recalled * (fade * k_scale)[None, :]
        u = u * beta[None, :]

        if BW > BT:
            for before in range(0, start, BT):  # earlier nodes, whose pseudo-values this program wrote to the record
                i = before + o_t
                k_i = _rows(k, bos + i, k_stride, i_h, o_k, i < count, K)
                coarse_i, fine_i = _path_sums(_path_masks(masks, i, count, CHAIN), all_t, all_g)
                D_i = _decay_between(mask, i, coarse, fine, coarse_i, fine_i) * _norm(k_i, i < count, L2_NORM)[None, :]
                p_u = rec_u + ((slab + wrap(offset + i, rows))[None, :] * HV + i_hv) * V + o_v[:, None]
                u_i = tl.load(p_u, mask=in_v[:, None], other=0.0)
                weights = dot_of_inputs(b_q, k_i, WIDEN) * D_i * q_scale[:, None]
                o = tl.dot(u_i, tl.trans(weights), acc=o, input_precision="tf32x3")
                if DELTA:
                    weights = dot_of_inputs(b_k, k_i, WIDEN) * D_i * (beta * k_scale)[:, None]
                    u = u - tl.dot(u_i, tl.trans(weights), input_precision="tf32x3")

        if DELTA:
            u = tl.dot(u, tl.trans(_inverse(A)), input_precision="tf32x3")
        tl.store(rec_u + (row[None, :] * HV + i_hv) * V + o_v[:, None], u, mask=out_t)
        o = tl.dot(u, tl.trans(seen), acc=o, input_precision="tf32x3")
        tl.store(out + (token[None, :] * HV + i_hv) * V + o_v[:, None], o.to(out.dtype.element_ty), mask=out_t)
        tl.debug_barrier()  # the next nodes read pseudo-values that other threads of this program wrote
