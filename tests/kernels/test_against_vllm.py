"""The replay variant and vLLM's snapshot kernel: not one differing bit, in outputs and in committed states."""

import pytest
import torch

from tests.kernels import cases
from tests.kernels.cases import Case, Parents, chain, comb, full, path_to, random_tree, star
from tests.kernels.checks import ONE, as_tensors
from tests.kernels.close import assert_same_bits
from thor_spec.kernels.gdn_commit import kernel as commit
from thor_spec.kernels.gdn_verify import kernel
from thor_spec.kernels.gdn_verify.tiles import Tiles

pytest.importorskip("vllm")


def same_as_snapshots(case: Case, leaves: list[list[int]], *, tiles: Tiles = ONE, per_token: bool = False) -> None:
    """Verify once; then each request's path to each given leaf must be vLLM's decoding of that path as a chain.

    Args:
        leaves: per request the nodes whose paths are compared; the first one is committed.
    """
    from tests.kernels.vllm_kernel import snapshots

    chains = [(r, path_to(case.parents[r], leaf)) for r, nodes in enumerate(leaves) for leaf in nodes]
    want, states = snapshots(case, chains, per_token=per_token)
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


def ends(parents: list[Parents]) -> list[list[int]]:
    return [[t for t in range(len(tree)) if t not in tree] for tree in parents]


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chains(state_dtype: torch.dtype, device: str) -> None:
    parents = [chain(16), chain(1), chain(5)]
    case = cases.make(parents, tree=False, value_heads=4, heads=2, key_dim=32, value_dim=32, state_dtype=state_dtype,
                      gate_dtype=torch.bfloat16)  # fmt: skip
    same_as_snapshots(case.to(device), ends(parents))


def test_real_head_dims(device: str) -> None:
    parents = [chain(16)]
    case = cases.make(parents, tree=False, key_dim=128, value_dim=128, gate_dtype=torch.bfloat16)
    same_as_snapshots(case.to(device), [[15]], tiles=Tiles(block_v=32, warps=4))


@pytest.mark.parametrize("parents", [[random_tree(17, 3), star(4)], [comb(15)], [full([2, 2, 2])]], ids=len)
def test_every_path_of_a_tree(parents: list[Parents], device: str) -> None:
    case = cases.make(parents, key_dim=32, value_dim=32)
    same_as_snapshots(case.to(device), ends(parents))


def test_walkers(device: str) -> None:
    parents = [full([3, 2])]
    same_as_snapshots(cases.make(parents).to(device), ends(parents), tiles=Tiles(block_v=16, warps=4, walkers=4))


def test_float32_states_survive_one_launch_per_token(device: str) -> None:
    parents = [chain(6), comb(7)]
    same_as_snapshots(cases.make(parents, dtype=torch.float32).to(device), ends(parents), per_token=True)


def test_per_channel_decay_token_by_token(device: str) -> None:
    """One token per launch: over several, vLLM's kernel advances its decay pointer by heads, not by heads times K."""
    parents = [comb(7)]
    case = cases.make(parents, per_channel=True, value_heads=1)
    same_as_snapshots(case.to(device), ends(parents), per_token=True)


def test_extreme_gates(device: str) -> None:
    parents = [random_tree(12, 5)]
    case = cases.make(
        parents,
        decays=lambda a: torch.where(a > 0.3, 60.0, -60.0),
        betas=lambda b: torch.where(b > 0, 200.0, -80.0),
    )
    same_as_snapshots(case.to(device), ends(parents))


@pytest.mark.gpu
def test_a_thousand_cases_at_real_dims() -> None:
    """Only where kernels are compiled: what a compiler may reorder, it must reorder alike on both sides."""
    for seed in range(1000):
        tree = [chain(1 + seed % 16)] if seed % 2 else [random_tree(1 + seed % 40, seed)]
        case = cases.make(
            tree, seed=seed, heads=2, value_heads=4, key_dim=128, value_dim=128, tree=not seed % 2,
            gate_dtype=torch.bfloat16, state_dtype=torch.bfloat16 if seed % 5 == 0 else torch.float32,
        )  # fmt: skip
        tiles = Tiles(block_v=(8, 16, 32)[seed % 3], warps=4, walkers=1 + seed % 2)
        same_as_snapshots(case.to("cuda"), ends(tree), tiles=tiles)
