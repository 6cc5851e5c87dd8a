"""vLLM's own snapshot kernel, called as its GDN layer calls it: one state per position."""

import torch
from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import fused_sigmoid_gating_delta_rule_update

from tests.kernels.cases import Case


def snapshots(
    case: Case, chains: list[tuple[int, list[int]]], *, per_token: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Decode chains of nodes; return per chain the outputs [n, HV, V] and the state after each node [n, HV, V, K].

    Args:
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
        out, _ = fused_sigmoid_gating_delta_rule_update(
            A_log=x["A_log"], a=x["a"][index].contiguous(), b=x["b"][index].contiguous(), dt_bias=x["dt_bias"],
            q=x["q"][index].contiguous()[None], k=x["k"][index].contiguous()[None], v=x["v"][index].contiguous()[None],
            initial_state=pool, inplace_final_state=True, cu_seqlens=cu, ssm_state_indices=where,
            num_accepted_tokens=torch.ones(len(cu) - 1, dtype=torch.int32, device=device),
            use_qk_l2norm_in_kernel=True, is_kda=case.record.per_channel,
        )  # fmt: skip
        return out[0]

    if not per_token:
        out = launch(flat, lengths, slots)
        pieces = [out[lengths[i] : lengths[i + 1]] for i in range(len(chains))]
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
