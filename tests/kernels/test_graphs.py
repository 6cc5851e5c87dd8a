"""One captured step serves whatever the buffers say at replay: counts, slots, trees, pending rows."""

import pytest
import torch

from tests.kernels import cases
from tests.kernels.checks import METHOD, Variant, as_tensors
from tests.kernels.close import assert_same_bits
from thor_spec.kernels.gdn_commit import kernel as commit
from thor_spec.kernels.gdn_verify import kernel
from thor_spec.kernels.tree_paths import kernel as tree_paths

pytestmark = pytest.mark.gpu
WIDTH = 9


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("variant", ["replay", "wy"])
def test_replays_read_the_buffers_of_the_moment(variant: Variant, deferred: bool) -> None:
    largest = cases.make([cases.comb(WIDTH)] * 3, key_dim=128, value_dim=32, deferred=deferred).to("cuda")
    parents = torch.tensor([cases.comb(WIDTH)] * 3, dtype=torch.int32, device="cuda")
    path, accepted = as_tensors([[0, 2, 4]] * 3, "cuda")
    out = torch.full(largest.args["v"].shape, torch.nan, device="cuda")
    args = largest.args

    def step() -> None:
        tree_paths.tree_paths(parents, args["cu_nodes"], out=args["paths"])
        kernel.gdn_verify(**args, variant=variant, out=out)
        where = args["state_indices"], args["record_indices"]
        if deferred:
            commit.gdn_compact(largest.record, *where, path, accepted)
            commit.gdn_advance(largest.record, *where, accepted, period=4)
        else:
            commit.gdn_commit(largest.state, where[0], largest.record, where[1], path, accepted, method=METHOD[variant])

    fresh = {name: value.clone() for name, value in buffers(largest).items()}
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    results = []
    for run in (graph.replay, step):
        for name, value in buffers(largest).items():
            value.copy_(fresh[name])
        out.fill_(torch.nan)
        for trees, slots, paths in (
            ([cases.star(4), cases.random_tree(9, 1), [-1]], [2, 1, 0], [[0, 3], [0], [0]]),
            ([cases.chain(9), cases.star(2), cases.comb(5)], [3, 0, 1], [[0, 1, 2, 3, 4], [0], [0, 2]]),
        ):
            fill(parents, args, trees, slots)
            new_path, new_accepted = as_tensors(paths, "cuda")
            path.zero_()
            path[:, : min(3, new_path.shape[1])] = new_path[:, :3]
            accepted.copy_(new_accepted.clamp(max=3))
            run()
        torch.cuda.synchronize()
        results.append([out.nan_to_num(7.0), largest.state.clone(), largest.record.u.nan_to_num(7.0)])
    for name, replayed, eager in zip(("output", "state", "u"), *results, strict=True):
        assert_same_bits(name, eager, replayed)


def buffers(case: cases.Case) -> dict[str, torch.Tensor]:
    record = {name: getattr(case.record, name) for name in type(case.record).__dataclass_fields__}
    return {"state": case.state} | {name: value for name, value in record.items() if value is not None}


def fill(parents: torch.Tensor, args: dict[str, torch.Tensor], trees: list[cases.Parents], slots: list[int]) -> None:
    """Write another batch into the captured buffers."""
    for r, tree in enumerate(trees):
        parents[r, : len(tree)] = torch.tensor(tree, dtype=torch.int32)
    counts = torch.tensor([0, *map(len, trees)])
    args["cu_nodes"].copy_(counts.cumsum(0))
    args["state_indices"].copy_(torch.tensor(slots))
