"""Sums over a batch: the kernel against torch, and torch against plain sums."""

import pytest
import torch

from thor_spec.kernels.tree_sums import kernel, reference


@pytest.mark.parametrize(("rows", "nodes", "positions"), [(1, 1, 1), (3, 12, 7), (9, 33, 15)])
def test_sums(rows: int, nodes: int, positions: int, device: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    scores = torch.randn(rows, positions, 5, generator=generator).log_softmax(-1).contiguous()
    prefixes = -3 * torch.rand(rows, nodes, generator=generator)
    prefixes[:, nodes // 2 + 1 :] = -torch.inf  # padding
    sampled = torch.randint(0, 3, (rows,), generator=generator, dtype=torch.int32)
    sampled[0] = 1
    accepted = torch.randint(0, 4, (20,), generator=generator, dtype=torch.int32)
    given = prefixes, scores, sampled, accepted
    want = reference.tree_sums(*given)
    out = torch.zeros(nodes + positions + 2, device=device)
    got = kernel.tree_sums(*(t.to(device) for t in given), out=out).cpu()
    assert torch.equal(got, out.cpu())
    assert got.tolist() == pytest.approx(want.tolist(), abs=1e-5)
    mine = [r for r in range(rows) if sampled[r] > 0]
    assert want[nodes - 1] == pytest.approx(sum(float(prefixes[r, nodes - 1].exp()) for r in mine))
    chain = sum(float(scores[r, :, 0].sum().exp()) for r in mine)
    assert want[nodes + positions - 1] == pytest.approx(chain)
    assert want[-2:].tolist() == [sum(max(int(accepted[r]) - 1, 0) for r in mine), len(mine)]
