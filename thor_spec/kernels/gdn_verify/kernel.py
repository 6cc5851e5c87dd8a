"""Launches the two Triton variants of ``reference.gdn_verify``."""

from typing import Literal

import torch
import triton

from thor_spec import env
from thor_spec.errors import ConfigError
from thor_spec.kernels.gdn_common.checks import check_record, check_state
from thor_spec.kernels.gdn_common.record import Record
from thor_spec.kernels.gdn_verify.replay.kernel import replay
from thor_spec.kernels.gdn_verify.tiles import SOLVE_WARPS, Tiles, launches_early, processors, replay_tiles, wy_tiles
from thor_spec.kernels.gdn_verify.wy.kernel import wy, wy_solve
from thor_spec.kernels.tree_paths.reference import MAX_NODES, TreePaths

Variant = Literal["replay", "wy"]


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
    variant: Variant = "replay",
    width: int | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Return every node's output; see ``reference.gdn_verify``. One launch (wy: two), no synchronization.

    Args:
        variant: ``replay`` computes in the order of one-token decoding, bit for bit. ``wy`` solves for all nodes at
            once: faster from a few nodes on, with float32 rounding of its own. Per-channel decay is ``replay`` only:
            there ``D`` depends on the channel, and the product form ``(k exp(gamma)) (k exp(-gamma))`` that would
            bring it back to a product of matrices overflows for strong decays.
        width: most nodes of a request in this launch, at most 64; None: ``paths``' width, or what the record holds for
            chains. Up to 16 and up to 32 smaller kernels serve.
        tiles: launch geometry; None: the table in ``tiles.py``.
    """
    heads, key_dim = k.shape[1:]
    value_heads, value_dim = v.shape[1:]
    requests = state_indices.numel()
    if width is None:
        width = min(MAX_NODES, record.rows) if paths is None else paths.masks.shape[1]
    deferred = record.pending is not None
    check_state(state, value_heads, value_dim, key_dim)
    check_record(record, state, heads, key_dim, k.dtype)
    _check_inputs(q, k, v, a, b, cu_nodes, record, requests, width, paths)
    if variant == "wy" and record.per_channel:
        raise ConfigError('Per-channel decay has no stable product form for trees: use variant="replay".')
    out = q.new_empty(v.shape) if out is None else out
    sms = processors(q.device)
    states = requests * value_heads
    common = {
        "q": q, "k": k, "v": v, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias, "state": state, "out": out,
        "state_indices": state_indices, "cu_nodes": cu_nodes,
        "masks": None if paths is None else paths.masks, "leaves": None if paths is None else paths.leaves,
        "rec_k": record.k, "rec_scale": record.k_scale, "rec_u": record.u, "rec_g": record.log_decay,
        "start_row": record.start, "pending": record.pending, "flush": record.flush, "record_indices": record_indices,
        "scale": key_dim**-0.5 if scale is None else scale,
        "q_stride": q.stride(0), "k_stride": k.stride(0), "v_stride": v.stride(0), "STATE_STRIDE": state.stride(0),
        "H": heads, "HV": value_heads, "K": key_dim, "V": value_dim,
        "width": width if paths is None else paths.masks.shape[1], "rows": record.rows,
        "CHAIN": paths is None, "DEFERRED": deferred, "DELTA": delta, "HAS_BETA": b is not None, "L2_NORM": l2_norm,
    }  # fmt: skip
    if variant == "replay":
        tiles = tiles or replay_tiles(
            heads=states, value_dim=value_dim, tree=paths is not None, deferred=deferred, sms=sms
        )
        if deferred and tiles.walkers > 1:
            raise ConfigError(
                "Several walkers would read a state that one of them is writing: with deferred commits use one."
            )
        split = triton.cdiv(value_dim, tiles.block_v)
        replay[(split * tiles.walkers, value_heads, requests)](
            **common, BK=triton.next_power_of_2(key_dim), BV=tiles.block_v, WALKERS=tiles.walkers,
            PER_CHANNEL=record.per_channel, num_warps=tiles.warps, num_stages=1,
        )  # fmt: skip
    else:
        exact_in_one = state.dtype == torch.bfloat16 and not deferred
        early = launches_early(q.device)
        block = next(size for size in (16, 32, MAX_NODES) if width <= size)
        tiles = tiles or wy_tiles(heads=states, value_dim=value_dim, block=block, sms=sms)
        common |= {
            "solution": q.new_empty((states, 2, block, block), dtype=torch.float32),
            "factors": q.new_empty((states, 2, block), dtype=torch.float32),
            "BK": max(16, triton.next_power_of_2(key_dim)), "BW": block, "TF32": tiles.tf32 or not l2_norm,
            "WIDEN": env.triton_interprets(), "EARLY": early,
        }  # fmt: skip
        wy_solve[(value_heads, requests)](
            **{name: common[name] for name in wy_solve.arg_names}, num_stages=1,
            num_warps=tiles.solve_warps or SOLVE_WARPS[block],
        )  # fmt: skip
        common |= {"BV": max(16, tiles.block_v), "PARTS": 1 if exact_in_one else tiles.parts}
        wy[(triton.cdiv(value_dim, tiles.block_v), value_heads, requests)](
            **{name: common[name] for name in wy.arg_names}, num_warps=tiles.warps, num_stages=1,
            **({"launch_pdl": True} if early else {}), **({"maxnreg": tiles.registers} if tiles.registers else {}),
        )  # fmt: skip
    return out


def _check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    cu_nodes: torch.Tensor,
    record: Record,
    requests: int,
    width: int,
    paths: TreePaths | None,
) -> None:
    tokens, heads, key_dim = k.shape
    if q.shape != k.shape or q.dtype != k.dtype or v.shape[0] != tokens or v.shape[1] % heads:
        raise ConfigError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must have the same tokens, q and k the "
            "same heads and dtype, and v a multiple of their heads."
        )
    if any(x.stride()[1:] != (x.shape[2], 1) for x in (q, k, v)):
        raise ConfigError("Only the first dimension of q, k and v may be strided: heads and channels must be adjacent.")
    decay_shape = (tokens, v.shape[1], key_dim) if record.per_channel else (tokens, v.shape[1])
    if (
        a.shape != decay_shape
        or not a.is_contiguous()
        or (b is not None and (b.shape != v.shape[:2] or not b.is_contiguous()))
    ):
        raise ConfigError(f"a must be contiguous {decay_shape} and b contiguous {tuple(v.shape[:2])}.")
    if cu_nodes.numel() != requests + 1 or (paths is not None and paths.masks.shape[0] < requests):
        raise ConfigError(f"{requests} state indices need {requests + 1} entries of cu_nodes and {requests} trees.")
    if width > min(MAX_NODES, record.rows) or (paths is not None and width > paths.masks.shape[1]):
        raise ConfigError(
            f"width={width} must be at most {MAX_NODES}, the record's {record.rows} rows, and the trees' masks."
        )
