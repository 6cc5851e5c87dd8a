"""Verification and commit in torch, node after node: trees without a GPU, in any dtype, to test everything around them.

Shapes: S verified rows, N = K + 1 tokens of the longest, D channels of the convolution, H key heads, HV value heads.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thor_spec.kernels.gdn_verify.reference import L2_EPSILON
from thor_spec.kernels.state_commit import reference
from thor_spec.kernels.state_commit.plan import Plan, Step
from thor_spec.vllm_plugin.one_state import cpu
from thor_spec.vllm_plugin.one_state.recorded import RecordScratch, to_commit


class TorchScratch(RecordScratch):
    """The record, written by torch."""

    def verify(self, layer: Any, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, on: Any) -> None:
        """Write the outputs of verified rows, one after another; states and windows stay as they are."""
        count = on.num_spec_decodes
        starts, places = on.spec_query_start_loc[: count + 1].long(), on.spec_rows[:count].long()
        node = torch.arange(layer.nodes)
        inside = node < starts.diff()[:, None]
        at = torch.where(inside, starts[:-1, None] + node, 0)
        chain = (node - 1).repeat(count, 1)
        parents = chain if layer.topology is None else layer.topology.row_parents[places].long()
        slots = on.spec_state_indices_tensor[:count, 0].long()
        found = unroll(layer, x[at], b[at], a[at], layer.window[slots], layer.state[slots], parents)
        out[at[inside]] = found.out[inside].to(out.dtype)
        self.inputs[places] = x[at]
        record = self.record
        record.k[places], record.k_scale[places] = found.k, found.k_scale
        record.u[places], record.log_decay[places] = found.u, found.log_decay


class Unrolled:
    """What ``unroll`` finds for each node, and the states of all of them."""

    def __init__(self, **found: torch.Tensor) -> None:
        self.out = found["out"]
        """[S, N, HV, V], float32."""
        self.k, self.k_scale, self.u, self.log_decay = (found[name] for name in ("k", "k_scale", "u", "log_decay"))
        self.states = found["states"]
        """The committed state, and behind it each node's [S, N + 1, HV, V, K], float32."""


def unroll(
    layer: Any,
    x: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    parents: torch.Tensor,
) -> Unrolled:
    """Decode each node behind its parent.

    Args:
        x: inputs of the convolution [S, N, D]. b, a: gates [S, N, HV].
        window: committed inputs, oldest first [S, D, taps - 1].
        state: committed states [S, HV, V, K].
        parents: [S, N], int64; -1: the committed state.
    """
    rows, nodes, _ = x.shape
    mixed = convolve(x, cpu.conv_weight(layer.conv1d), layer.conv1d.bias, window, parents)
    keys, values = layer.key_dim // layer.tp_size, layer.value_dim // layer.tp_size
    q, k, v = mixed.split([keys, keys, values], dim=-1)
    q, k = (part.unflatten(2, (-1, layer.head_k_dim)) for part in (q, k))
    v = v.unflatten(2, (-1, layer.head_v_dim)).float()
    k_scale = torch.rsqrt(k.float().square().sum(-1) + L2_EPSILON)
    q_scale = torch.rsqrt(q.float().square().sum(-1) + L2_EPSILON) * layer.head_k_dim**-0.5
    group = v.shape[2] // k.shape[2]
    k_of = (k.float() * k_scale[..., None]).repeat_interleave(group, dim=2)
    q_of = (q.float() * q_scale[..., None]).repeat_interleave(group, dim=2)
    log_decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
    alpha, beta = log_decay.exp(), torch.sigmoid(b.float())
    states = state.new_empty(rows, nodes + 1, *state.shape[1:], dtype=torch.float32)
    states[:, 0] = state.float()
    u, out, row = torch.empty_like(v), torch.empty_like(v), torch.arange(rows, device=x.device)
    for t in range(nodes):
        h = states[row, parents[:, t] + 1] * alpha[:, t, :, None, None]

        u[:, t] = beta[:, t, :, None] * (v[:, t] - (h * k_of[:, t, :, None]).sum(-1))
        h = h + u[:, t, :, :, None] * k_of[:, t, :, None]
        out[:, t] = (h * q_of[:, t, :, None]).sum(-1)
        states[:, t + 1] = h
    return Unrolled(out=out, k=k, k_scale=k_scale, u=u, log_decay=log_decay, states=states)


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: torch.Tensor, parents: torch.Tensor
) -> torch.Tensor:
    """As ``kernels.conv_tree``: products in the dtype of ``x``, summed in float32 from the oldest tap on."""
    taps = weight.shape[1]
    joined = torch.cat([window.transpose(1, 2).to(x.dtype), x], dim=1)
    lags = [torch.arange(x.shape[1], device=x.device).repeat(len(x), 1)]
    for _ in range(taps - 1):  # nodes below 0 are those of the window, the newest one -1
        last = lags[-1]
        lags.append(torch.where(last >= 0, parents.gather(1, last.clamp(min=0)), last - 1))
    total = torch.zeros_like(x, dtype=torch.float32) if bias is None else bias.float().expand(x.shape).clone()
    row = torch.arange(len(x), device=x.device)[:, None]
    for tap, node in enumerate(reversed(lags)):
        total += (joined[row, node + taps - 1] * weight[:, tap].to(x.dtype)).float()
    return F.silu(total).to(x.dtype)


def prefill(layer: Any, metadata: Any, x: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
    """Run prompts token by token, from and to the states they own: what vLLM's operators do in bfloat16 only."""
    starts = metadata.non_spec_query_start_loc.tolist()
    fresh = metadata.has_initial_state
    for r, slot in enumerate(metadata.non_spec_state_indices_tensor.tolist()[: len(starts) - 1]):
        rows = slice(starts[r], starts[r + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        if fresh is not None and not bool(fresh[r]):
            layer.state[slot], layer.window[slot] = 0, 0
        found = unroll(
            layer, x[None, rows], b[None, rows], a[None, rows], layer.window[slot, None], layer.state[slot, None],
            torch.arange(-1, count - 1)[None],
        )  # fmt: skip
        out[rows] = found.out[0].to(out.dtype)
        layer.state[slot] = found.states[0, -1].to(layer.state.dtype)
        joined = torch.cat([layer.window[slot].T, x[rows].to(layer.window.dtype)])
        layer.window[slot] = joined[len(joined) - layer.window.shape[2] :].T.clone()


class TorchCommit:
    """Commits by the definition of the kernels."""

    def __init__(self, layers: Sequence[Any], groups: Sequence[int], tables: Sequence[torch.Tensor], rows: int) -> None:
        self.layers = to_commit(layers, groups)
        self._tables = tables
        self._plan = Plan.allocate(groups=len(tables), rows=rows, device="cpu")

    def commit(self, step: Step, *, block_size: int) -> None:
        """Fold what the step's rows have gained into their states; ``block_size`` as in ``plan_commit``."""
        reference.plan_commit(self._plan, step, self._tables, block_size=block_size)
        reference.commit_states(self.layers, self._plan, rows=step.rows, path=step.path)
        reference.commit_windows(self.layers, self._plan, rows=step.rows, path=step.path)
