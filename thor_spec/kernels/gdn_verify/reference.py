"""Definition of tree verification for gated delta rule layers, in closed form.

Shapes: R requests, T nodes of all requests together, H key heads, HV value heads (a multiple of H: head h serves
``HV / H`` consecutive value heads), K key dim, V value dim, W nodes of the largest tree.
"""

import torch
import torch.nn.functional as F

from thor_spec.kernels.gdn_common.record import Record
from thor_spec.kernels.tree_paths.reference import MAX_NODES, TreePaths

L2_EPSILON = 1e-6
SOFTPLUS_THRESHOLD = 20.0


def gdn_verify(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_indices: torch.Tensor,
    cu_nodes: torch.Tensor,
    record: Record,
    record_indices: torch.Tensor,
    *,
    paths: TreePaths | None = None,
    delta: bool = True,
    l2_norm: bool = True,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return every node's output as if its path from the root had been decoded token by token.

    Per value head, with p(t) the parent of node t and S_{p(root)} the committed state::

        alpha_t = exp(-exp(A_log) * softplus(a_t + dt_bias));  beta_t = sigmoid(b_t)
        S_t = alpha_t S_{p(t)} + u_t k_t^T;   u_t = beta_t (v_t - alpha_t S_{p(t)} k_t)
        o_t = S_t q_t

    computed without any S_t: ``gamma_t`` sums log alpha from the root to t, ``D[t, i] = exp(gamma_t - gamma_i)`` for i
    on the path of t::

        (I + diag(beta) strict(D * K K^T)) U = beta (V - exp(gamma) S_0 K)
        O = exp(gamma) S_0 Q + (D * Q K^T) U

    Args:
        q, k: [T, H, K], before normalization; bfloat16, float16 or float32. Rows may be strided, as views of one
            projection are.
        v: [T, HV, V], strided likewise.
        a: decay input [T, HV], or [T, HV, K] where every channel decays by itself (KDA).
        b: input of the write strength [T, HV]; None: 1.
        A_log: [HV]. dt_bias: [HV], or [HV, K] with per-channel decay.
        state: [slots, HV, V, K], bfloat16 or float32. Slots of no request are not touched; those of the batch are
            written only by a flush (below).
        state_indices: [R]; a value <= 0 marks a padding row, for which nothing is read or written.
        cu_nodes: [R + 1], first node of each request; more than W nodes count as W, the others are not computed.
        record: gets one row per node, behind the pending ones. With pending rows, the committed state is ``state``
            advanced over them; where ``record.flush`` is set, it is also written to ``state``, once.
        record_indices: request slot of each row [R].
        paths: None for chains; then W is what the record holds.
        delta: False leaves out the erase term, ``u_t = beta_t v_t``: scalar-decay state space models (STree).
        l2_norm: normalize q and k, ``z / sqrt(sum z^2 + 1e-6)``.
        scale: of q; None: ``K ** -0.5``.
        out: [T, HV, V] to write to; None: a new one in ``q.dtype``.

    The state's own dtype rounds once per commit. Computes in float64 if ``state`` is, else in float32.

    Source: arXiv:2412.06464 (gated delta rule), arXiv:2608.20961 (trees), arXiv:2505.14969 (``delta=False``).
    """
    heads, key_dim = k.shape[1:]
    value_heads = v.shape[1]
    width = min(MAX_NODES, record.rows) if paths is None else paths.masks.shape[1]
    real = torch.float64 if state.dtype == torch.float64 else torch.float32
    scale = key_dim**-0.5 if scale is None else scale
    out = q.new_empty(v.shape) if out is None else out
    for r, slot in enumerate(state_indices.tolist()):
        bos, count = int(cu_nodes[r]), min(int(cu_nodes[r + 1] - cu_nodes[r]), width)
        if slot <= 0 or count <= 0:
            continue
        rec = int(record_indices[r])
        first = 0
        start = state[slot].to(real)
        if record.pending is not None and record.flush is not None:
            first = int(record.pending[rec])
            start = advance(start, record, rec, record.ring(rec, range(first)))
            if first and record.flush[rec]:
                state[slot] = start.to(state.dtype)
                start = state[slot].to(real)
        nodes = slice(bos, bos + count)
        q_t, k_t, v_t = (x[nodes].to(real) for x in (q, k, v))
        q_t, _ = _normalized(q_t, l2_norm)
        k_t, k_scale = _normalized(k_t, l2_norm)
        g = log_decay(a[nodes].to(real), A_log.to(real), dt_bias.to(real))
        beta = torch.ones_like(v_t[..., 0]) if b is None else torch.sigmoid(b[nodes].to(real))
        rows = record.ring(rec, range(first, first + count))
        record.k[rec, rows], record.k_scale[rec, rows], record.log_decay[rec, rows] = k[nodes], k_scale, g

        above = _ancestors(paths, r, count, q.device)
        group = value_heads // heads
        k_t, q_t = (x.repeat_interleave(group, dim=1) for x in (k_t, q_t * scale))
        g = g if record.per_channel else g[..., None].expand(count, value_heads, key_dim)
        gamma = torch.einsum("ti,ihk->thk", above.to(real), g)
        between = (gamma[:, None] - gamma[None, :]).masked_fill(~above[:, :, None, None], -torch.inf).exp()
        fade = gamma.exp()
        u = beta[..., None] * v_t
        if delta:
            u = u - beta[..., None] * torch.einsum("hvk,thk->thv", start, fade * k_t)
            pairs = torch.einsum("thk,tihk,ihk->hti", k_t, between, k_t) * beta.T[:, :, None]
            lower = torch.tril(pairs, -1) + torch.eye(count, dtype=real, device=q.device)
            solved = torch.linalg.solve_triangular(lower, u.transpose(0, 1), upper=False, unitriangular=True)
            u = solved.transpose(0, 1)
        record.u[rec, rows] = u
        weights = torch.einsum("thk,tihk,ihk->hti", q_t, between, k_t)
        o = torch.einsum("hvk,thk->thv", start, fade * q_t) + torch.einsum("hti,ihv->thv", weights, u)
        out[nodes] = o.to(out.dtype)
    return out


def log_decay(a: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Return ``-exp(A_log) softplus(a + dt_bias)``; A_log broadcasts over channels if there are any."""
    A_log = A_log[:, None] if a.dim() == 3 else A_log
    return -A_log.exp() * F.softplus(a + dt_bias, threshold=SOFTPLUS_THRESHOLD)


def advance(start: torch.Tensor, record: Record, rec: int, rows: list[int]) -> torch.Tensor:
    """Return the state [HV, V, K] after the record's ``rows``, one by one."""
    group = start.shape[0] // record.k.shape[2]
    h = start
    for row in rows:
        k = record.k[rec, row].to(h.dtype) * record.k_scale[rec, row].to(h.dtype)[:, None]
        alpha = record.log_decay[rec, row].to(h.dtype).exp()
        alpha = alpha[:, None, :] if record.per_channel else alpha[:, None, None]
        u = record.u[rec, row].to(h.dtype)
        h = h * alpha + u[:, :, None] * k.repeat_interleave(group, dim=0)[:, None, :]
    return h


def _normalized(x: torch.Tensor, wanted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.rsqrt(x.square().sum(-1) + L2_EPSILON) if wanted else torch.ones_like(x[..., 0])
    return x * scale[..., None], scale


def _ancestors(paths: TreePaths | None, r: int, count: int, device: torch.device) -> torch.Tensor:
    """Return [count, count] booleans: whether column i lies on the path of row t, t included."""
    if paths is None:
        return torch.ones(count, count, dtype=torch.bool, device=device).tril()
    bits = torch.arange(count, device=device)
    return (paths.masks[r, :count, None] >> bits & 1).bool()
