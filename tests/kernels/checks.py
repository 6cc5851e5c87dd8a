"""What a right pair of kernels does; the tests call these on many cases, the mutants on a few."""

from typing import Any, Literal

import torch

from tests.kernels.cases import Case, path_to
from tests.kernels.close import assert_close, assert_same_bits
from thor_spec.kernels.gdn_commit import kernel as commit
from thor_spec.kernels.gdn_commit import reference as commit_reference
from thor_spec.kernels.gdn_verify import kernel, reference
from thor_spec.kernels.gdn_verify.tiles import Tiles

Variant = Literal["replay", "wy"]
METHOD: dict[str, Literal["replay", "product"]] = {"replay": "replay", "wy": "product"}
ONE = Tiles(block_v=16, warps=4)


def verify(case: Case, variant: Variant, *, tiles: Tiles = ONE, **options: Any) -> torch.Tensor:
    """Run the kernel into a float32 buffer full of NaN, so that the output's own rounding does not hide errors."""
    out = torch.full(case.args["v"].shape, torch.nan, device=case.args["v"].device)
    width = case.args["cu_nodes"].diff().max().item() if case.args["paths"] is None else None
    return kernel.gdn_verify(**case.args, variant=variant, out=out, tiles=tiles, **{"width": width, **options})


def live(case: Case) -> torch.Tensor:
    """Tokens that belong to no padding row."""
    owner = torch.repeat_interleave(case.args["state_indices"].cpu() > 0, torch.tensor(case.counts))
    return owner


def rows_of(case: Case, tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The record's rows of every live request, joined."""
    parts = [
        tensor[rec, first : first + count]
        for rec, slot, count in zip(
            case.args["record_indices"].tolist(), case.args["state_indices"].tolist(), case.counts, strict=True
        )
        if slot > 0
    ]
    return torch.cat(parts).cpu()


def check_verify(case: Case, variant: Variant, device: str, *, tiles: Tiles = ONE, **options: Any) -> Case:
    """Compare outputs and record with the float64 reference; nothing else may be written. Return the case as run."""
    want = case.in_float64()
    for name in ("k", "k_scale", "u", "log_decay"):
        getattr(want.record, name).fill_(torch.nan)
    case = case.to(device)
    for name in ("k", "k_scale", "u", "log_decay"):
        getattr(case.record, name).fill_(torch.nan)
    out = torch.full(case.args["v"].shape, torch.nan, dtype=torch.float64)
    reference.gdn_verify(**want.args, out=out, **options)
    before = case.state.clone()
    got = verify(case, variant, tiles=tiles, **options)
    there = live(case)
    assert_close("output", out[there], got[there.to(device)])
    assert got[~there.to(device)].isnan().all(), "a padding row's output was written"
    for name in ("k", "k_scale", "u", "log_decay"):
        # An exponent's absolute error counts; softplus near 0 has no relative precision in float32, in vLLM neither.
        floor = 1e-2 if name == "log_decay" else 1e-30
        rows = rows_of(want, getattr(want.record, name)), rows_of(case, getattr(case.record, name))
        assert_close(name, *rows, floor=floor)
        untouched = getattr(want.record, name).isnan()
        assert getattr(case.record, name).cpu()[untouched].isnan().all(), f"{name}: a row of nobody was written"
    assert_same_bits("state", before, case.state)
    return case


def check_commit(case: Case, variant: Variant, device: str, seed: int = 0) -> None:
    """Verify, accept one random path per request, commit; compare with the reference on the kernel's own record."""
    g = torch.Generator().manual_seed(seed)
    case = case.to(device)
    verify(case, variant)
    paths = [path_to(p, int(torch.randint(len(p), (1,), generator=g))) for p in case.parents]
    path, accepted = as_tensors(paths, device)
    want = case.in_float64().state
    commit_reference.gdn_commit(
        want, case.args["state_indices"], case.record, case.args["record_indices"], path, accepted
    )
    before = case.state.clone()
    commit.gdn_commit(
        case.state, case.args["state_indices"], case.record, case.args["record_indices"],
        path, accepted, method=METHOD[variant], tiles=ONE,
    )  # fmt: skip
    slots = [s for s in case.args["state_indices"].tolist() if s > 0]
    others = [s for s in range(len(before)) if s not in slots]
    assert_same_bits("slots of nobody", before[others], case.state[others])
    budget = 1e-5 if case.state.dtype == torch.float32 else 2**-8
    assert_close("committed state", want[slots], case.state[slots], budget)


def as_tensors(paths: list[list[int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, paths))
    path = torch.full((len(paths), width), 1 << 20, dtype=torch.int32)
    for r, nodes in enumerate(paths):
        path[r, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
    return path.to(device), torch.tensor([len(p) for p in paths], dtype=torch.int32, device=device)
