"""vLLM's own snapshot kernel, called as its GDN layer calls it: one state per position."""

from collections.abc import Callable
from typing import Any

import torch

from tests.kernels.cases import Case, path_to
from tests.kernels.checks import as_tensors
from tests.kernels.close import assert_same_bits
from thor_spec.kernels.gdn_commit import kernel as commit
from thor_spec.kernels.gdn_verify import kernel
from thor_spec.kernels.gdn_verify.tiles import Tiles

Snapshot = Callable[..., Any]


def snapshots(
    snapshot: Snapshot, case: Case, chains: list[tuple[int, list[int]]], *, per_token: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Decode chains of nodes; return per chain the outputs [n, HV, V] and the state after each node [n, HV, V, K].

    Args:
        snapshot: ``fused_sigmoid_gating_delta_rule_update``.
        chains: request and its nodes in order.
        per_token: one launch per token, each reading the state that the last one wrote.
    """
    x = case.args
    device = case.state.device
    tokens = [[int(x["cu_nodes"][r]) + t for t in nodes] for r, nodes in chains]
    flat = torch.tensor([t for nodes in tokens for t in nodes], device=device)
    longest = max(map(len, tokens))
    # A pool of its own: position 0 overwrites the committed state in place, as in vLLM.
    pool = torch.full((1 + len(chains) * longest, *case.state.shape[1:]), torch.nan, device=device).to(case.state.dtype)
    slots = 1 + torch.arange(len(chains) * longest, dtype=torch.int32, device=device).view(len(chains), longest)
    for i, (r, _) in enumerate(chains):
        pool[slots[i, 0]] = case.state[x["state_indices"][r]]
    lengths = torch.tensor([0, *map(len, tokens)]).cumsum(0).to(torch.int32).to(device)

    def launch(index: torch.Tensor, cu: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        out, _ = snapshot(
            A_log=x["A_log"], a=x["a"][index].contiguous(), b=x["b"][index].contiguous(), dt_bias=x["dt_bias"],
            q=x["q"][index].contiguous()[None], k=x["k"][index].contiguous()[None], v=x["v"][index].contiguous()[None],
            initial_state=pool, inplace_final_state=True, cu_seqlens=cu, ssm_state_indices=where,
            num_accepted_tokens=torch.ones(len(cu) - 1, dtype=torch.int32, device=device),
            use_qk_l2norm_in_kernel=True, is_kda=case.record.per_channel,
        )  # fmt: skip
        result: torch.Tensor = out[0]
        return result

    if not per_token:
        out = launch(flat, lengths, slots)
        ends = lengths.tolist()
        pieces = [out[ends[i] : ends[i + 1]] for i in range(len(chains))]
        return pieces, [pool[slots[i, : len(nodes)].long()] for i, nodes in enumerate(tokens)]
    pieces, states = [], []
    for i, nodes in enumerate(tokens):
        outputs, after = [], []
        for t in nodes:
            one = torch.tensor([0, 1], dtype=torch.int32, device=device)
            outputs.append(launch(torch.tensor([t], device=device), one, slots[i : i + 1, :1])[0])
            after.append(pool[slots[i, 0]].clone())
        pieces.append(torch.stack(outputs))
        states.append(torch.stack(after))
    return pieces, states


def same_as_snapshots(
    snapshot: Snapshot, case: Case, leaves: list[list[int]], *, tiles: Tiles | None = None, per_token: bool = False
) -> None:
    """Verify once; then each request's path to each given leaf must be vLLM's decoding of that path as a chain.

    Args:
        leaves: per request the nodes whose paths are compared; the path to the first one is committed.
    """
    # vLLM's own tile: it decides how lanes split a row.
    tiles = tiles or Tiles(block_v=min(32, case.args["v"].shape[2]), warps=4)
    chains = [(r, path_to(case.parents[r], leaf)) for r, nodes in enumerate(leaves) for leaf in nodes]
    want, states = snapshots(snapshot, case, chains, per_token=per_token)
    got = torch.full(case.args["v"].shape, torch.nan, dtype=case.args["q"].dtype, device=case.state.device)
    kernel.gdn_verify(**case.args, variant="replay", out=got, tiles=tiles)
    for (r, path), outputs in zip(chains, want, strict=True):
        assert_same_bits(f"outputs of {path}", outputs, got[int(case.args["cu_nodes"][r]) + torch.tensor(path)])
    firsts = [next(i for i, (owner, _) in enumerate(chains) if owner == r) for r in range(len(leaves))]
    path, accepted = as_tensors([chains[i][1] for i in firsts], str(case.state.device))
    commit.gdn_commit(
        case.state, case.args["state_indices"], case.record, case.args["record_indices"], path, accepted, tiles=tiles
    )
    for r, i in enumerate(firsts):
        assert_same_bits(f"state of request {r}", states[i][-1], case.state[case.args["state_indices"][r]])


def random_case(seed: int) -> tuple[Case, list[list[int]], Tiles]:
    """A chain or a tree at the real head dims, its leaves, and vLLM's launch geometry, with one walker or two."""
    from tests.kernels import cases

    tree = cases.random_tree(1 + seed % 40, seed) if seed % 2 else cases.chain(1 + seed % 16)
    case = cases.make(
        [tree], seed=seed, heads=2, value_heads=4, key_dim=128, value_dim=128, tree=bool(seed % 2),
        gate_dtype=torch.bfloat16, state_dtype=torch.bfloat16 if seed % 5 == 0 else torch.float32,
    )  # fmt: skip
    tiles = Tiles(block_v=32, warps=4, walkers=1 + seed % 2)
    return case, [[t for t in range(len(tree)) if t not in tree]], tiles
