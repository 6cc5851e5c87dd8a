"""Verification step by step, in the arithmetic order of vLLM's ``fused_sigmoid_gating_delta_rule_update``.

A program owns BV rows of one head's state and keeps them in registers. A chain is one walk. A tree is one walk per
leaf: the part of its path that an earlier walk computed is repeated from the record, which costs one multiply-add per
element and no reduction and gives the same bits; only new nodes are computed in full. With WALKERS > 1, several
programs share the leaves of one head, so that one small request fills the device; nodes above the point where their
leaves part are then computed by each of them, with equal bits.
"""

import triton
import triton.language as tl

from thor_spec.kernels.gdn_common.kernel import decay, fold_rows, log_decay, lowest_node, wrap


@triton.jit
def _fetch(q, k, v, a, b, token, i_h, i_hv, o_k, o_v, q_stride, k_stride, v_stride,
           HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HAS_BETA: tl.constexpr,
           PER_CHANNEL: tl.constexpr):  # fmt: skip
    """Return a token's q, k, v, a and b as they came."""
    in_k = o_k < K
    b_q = tl.load(q + token * q_stride + i_h * K + o_k, mask=in_k, other=0.0)
    b_k = tl.load(k + token * k_stride + i_h * K + o_k, mask=in_k, other=0.0)
    b_v = tl.load(v + token * v_stride + i_hv * V + o_v, mask=o_v < V, other=0.0)
    if PER_CHANNEL:
        b_a = tl.load(a + (token * HV + i_hv) * K + o_k, mask=in_k, other=0.0)
    else:
        b_a = tl.load(a + token * HV + i_hv)
    b_b = b_a
    if HAS_BETA:
        b_b = tl.load(b + token * HV + i_hv)
    return b_q, b_k, b_v, b_a, b_b


@triton.jit
def _prepare(b_q, raw, b_v, b_a, b_b, A, dt_bias, scale, HAS_BETA: tl.constexpr, L2_NORM: tl.constexpr):  # fmt: skip
    """Return q and k as the recurrence uses them, the key's scale, v, beta and the log decay."""
    b_q = b_q.to(tl.float32)
    b_k = raw.to(tl.float32)
    b_v = b_v.to(tl.float32)
    beta = tl.full([], 1.0, tl.float32)
    if HAS_BETA:
        beta = tl.sigmoid(b_b.to(tl.float32))
    g = log_decay(b_a.to(tl.float32) + dt_bias, A)
    k_scale = tl.full([], 1.0, tl.float32)
    if L2_NORM:
        b_q = b_q * (tl.rsqrt(tl.sum(b_q * b_q) + 1e-6))
        k_scale = tl.rsqrt(tl.sum(b_k * b_k) + 1e-6)
        b_k = b_k * k_scale
    b_q = b_q * scale
    return b_q, b_k, k_scale, b_v, beta, g


@triton.jit
def _step(h, b_q, b_k, b_v, beta, g, DELTA: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Return the state, the pseudo-value and the output of one token."""
    h = decay(h, tl.exp(g), PER_CHANNEL)
    if DELTA:
        b_v -= tl.sum(h * b_k[None, :], 1)
    b_v *= beta
    h += b_v[:, None] * b_k[None, :]
    return h, b_v, tl.sum(h * b_q[None, :], 1)


@triton.jit
def _store_node(out, rec_k, rec_scale, rec_u, rec_g, token, row, o, u, raw, k_scale, g, i_h, i_hv, i_v, o_k, o_v,
                H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                PER_CHANNEL: tl.constexpr):  # fmt: skip
    in_v = o_v < V
    tl.store(out + (token * HV + i_hv) * V + o_v, o.to(out.dtype.element_ty), mask=in_v)
    tl.store(rec_u + (row * HV + i_hv) * V + o_v, u, mask=in_v)
    if i_v == 0:
        if PER_CHANNEL:
            tl.store(rec_g + (row * HV + i_hv) * K + o_k, g, mask=o_k < K)
        else:
            tl.store(rec_g + row * HV + i_hv, g)
        if i_hv % (HV // H) == 0:
            tl.store(rec_k + (row * H + i_h) * K + o_k, raw, mask=o_k < K)
            tl.store(rec_scale + row * H + i_h, k_scale)


@triton.jit(do_not_specialize=["width", "rows"])
def replay(q, k, v, a, b, A_log, dt_bias, state, out, state_indices, cu_nodes, masks, leaves,
           rec_k, rec_scale, rec_u, rec_g, start_row, pending, flush, record_indices, scale, width, rows,
           q_stride, k_stride, v_stride, STATE_STRIDE: tl.constexpr,
           H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
           WALKERS: tl.constexpr, CHAIN: tl.constexpr, DEFERRED: tl.constexpr,
           DELTA: tl.constexpr, HAS_BETA: tl.constexpr, L2_NORM: tl.constexpr, PER_CHANNEL: tl.constexpr):  # fmt: skip
    i_v, walker = tl.program_id(0) // WALKERS, tl.program_id(0) % WALKERS
    i_hv, i_r = tl.program_id(1), tl.program_id(2)
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
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    inside = (o_v < V)[:, None] & (o_k < K)[None, :]
    p_h = state + slot * STATE_STRIDE + i_hv * V * K + o_v[:, None] * K + o_k[None, :]
    start = tl.zeros([BV, BK], dtype=tl.float32)
    start += tl.load(p_h, mask=inside, other=0).to(tl.float32)
    A = tl.load(A_log + i_hv).to(tl.float32)
    if PER_CHANNEL:
        bias = tl.load(dt_bias + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    else:
        bias = tl.load(dt_bias + i_hv).to(tl.float32)

    if DEFERRED:  # one walker only: nobody else reads the tile that is written here
        offset = tl.load(start_row + rec)
        kept = tl.load(pending + rec)
        start = fold_rows(start, slab, rows, offset, kept, pending, rec_k, rec_scale, rec_u, rec_g, i_h, i_hv, o_k, o_v,
                          H, HV, K, V, PER_CHANNEL, False)  # fmt: skip
        if (kept > 0) & (tl.load(flush + rec) != 0):
            rounded = start.to(state.dtype.element_ty)
            tl.store(p_h, rounded, mask=inside)
            start = rounded.to(tl.float32)  # a state of less than float32 is what the next token would read
        offset = wrap(offset + kept, rows)

    if CHAIN:
        h = start
        q_raw, k_raw, v_raw, a_raw, b_raw = _fetch(
            q, k, v, a, b, bos, i_h, i_hv, o_k, o_v, q_stride, k_stride, v_stride, HV, K, V, HAS_BETA, PER_CHANNEL
        )
        for t in range(count):
            q_next, k_next, v_next, a_next, b_next = _fetch(
                q, k, v, a, b, bos + tl.minimum(t + 1, count - 1), i_h, i_hv, o_k, o_v, q_stride, k_stride, v_stride,
                HV, K, V, HAS_BETA, PER_CHANNEL)  # fmt: skip
            b_q, b_k, k_scale, b_v, beta, g = _prepare(
                q_raw, k_raw, v_raw, a_raw, b_raw, A, bias, scale, HAS_BETA, L2_NORM
            )
            h, u, o = _step(h, b_q, b_k, b_v, beta, g, DELTA, PER_CHANNEL)
            _store_node(out, rec_k, rec_scale, rec_u, rec_g, bos + t, slab + wrap(offset + t, rows), o, u, k_raw,
                        k_scale, g, i_h, i_hv, i_v, o_k, o_v, H, HV, K, V, PER_CHANNEL)  # fmt: skip
            q_raw, k_raw, v_raw, a_raw, b_raw = q_next, k_next, v_next, a_next, b_next
    else:
        todo = tl.load(leaves + i_r)
        done = todo & 0
        branch = start  # the state where the last walk left the beaten path, and the nodes that led there
        branch_path = todo & 0
        turn = 0
        while todo != 0:
            leaf = lowest_node(todo)
            todo = todo & (todo - 1)
            if turn % WALKERS == walker:
                path = tl.load(masks + i_r * width + leaf)
                beaten = path & done
                reuse = (branch_path & ~beaten) == 0
                h = tl.where(reuse, branch, start)
                again = tl.where(reuse, beaten & ~branch_path, beaten)
                while again != 0:
                    t = lowest_node(again)
                    again = again & (again - 1)
                    # Of the record only u is this program's own; keys and decays may be another's, still to be written.
                    q_raw, k_raw, v_raw, a_raw, b_raw = _fetch(
                        q, k, v, a, b, bos + t, i_h, i_hv, o_k, o_v, q_stride, k_stride, v_stride,
                        HV, K, V, HAS_BETA, PER_CHANNEL)  # fmt: skip
                    _, b_k, _, _, _, g = _prepare(q_raw, k_raw, v_raw, a_raw, b_raw, A, bias, scale, HAS_BETA, L2_NORM)
                    u = tl.load(
                        rec_u + ((slab + wrap(offset + t, rows)) * HV + i_hv) * V + o_v, mask=o_v < V, other=0.0
                    )
                    h = tl.fma(u[:, None], b_k[None, :], decay(h, tl.exp(g), PER_CHANNEL))
                branch = h
                branch_path = beaten
                # As at the load: what enters the loop decides which products the compiler fuses in a sum over K.
                h = tl.zeros([BV, BK], dtype=tl.float32) + h
                fresh = path & ~done
                done = done | path
                while fresh != 0:
                    t = lowest_node(fresh)
                    fresh = fresh & (fresh - 1)
                    q_raw, k_raw, v_raw, a_raw, b_raw = _fetch(
                        q, k, v, a, b, bos + t, i_h, i_hv, o_k, o_v, q_stride, k_stride, v_stride,
                        HV, K, V, HAS_BETA, PER_CHANNEL)  # fmt: skip
                    b_q, b_k, k_scale, b_v, beta, g = _prepare(
                        q_raw, k_raw, v_raw, a_raw, b_raw, A, bias, scale, HAS_BETA, L2_NORM
                    )
                    h, u, o = _step(h, b_q, b_k, b_v, beta, g, DELTA, PER_CHANNEL)
                    _store_node(out, rec_k, rec_scale, rec_u, rec_g, bos + t, slab + wrap(offset + t, rows), o, u,
                                k_raw, k_scale, g, i_h, i_hv, i_v, o_k, o_v, H, HV, K, V, PER_CHANNEL)  # fmt: skip
                tl.debug_barrier()  # the next walk reads rows that other threads of this program wrote
            turn += 1
