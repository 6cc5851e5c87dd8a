"""The convolution along tree paths: against its definition, against vLLM's kernel for chains, and what must fail."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from tests.kernels.cases import chain, comb, depth_first, full, path_to, random_tree, star
from tests.kernels.close import assert_close, assert_same_bits
from tests.kernels.mutants import mutant
from thor_spec.errors import ConfigError
from thor_spec.kernels.conv_tree import kernel, reference

BATCHES = {
    "one node": [chain(1)],
    "chain": [chain(16)],
    "star": [star(9)],
    "comb": [comb(13)],
    "full": [full((2, 2, 2))],
    "mixed": [random_tree(17, 1), chain(2), depth_first(random_tree(11, 2)), star(5)],
    "64": [random_tree(64, 3)],
}
ROUNDED = {torch.float32: 1e-6, torch.bfloat16: 2**-8}  # of the output alone: the products round alike


def case(trees: list[list[int]], device: str = "cpu", *, dtype: torch.dtype = torch.float32, dim: int = 40,
         taps: int = 4, bias: bool = True, seed: int = 0) -> dict[str, Any]:  # fmt: skip
    """Arguments of ``conv_tree``; slot 1 and the last one belong to nobody and are NaN."""
    g = torch.Generator().manual_seed(seed)
    total, width, requests = sum(map(len, trees)), max(map(len, trees)), len(trees)
    window = torch.randn(requests + 3, taps - 1, dim, generator=g).transpose(1, 2)  # channels adjacent, as in vLLM
    window[1] = window[-1] = torch.nan
    parents = torch.full((requests, width), 1 << 20, dtype=torch.int32)
    for r, tree in enumerate(trees):
        parents[r, : len(tree)] = torch.tensor(tree, dtype=torch.int32)
    sizes = torch.tensor([0, *map(len, trees)])
    args = {
        "x": torch.randn(total, dim, generator=g).to(dtype),
        "weight": torch.randn(dim, taps, generator=g).to(dtype),
        "bias": torch.randn(dim, generator=g).to(dtype) if bias else None,
        "window": window.to(dtype),
        "window_indices": torch.arange(2, requests + 2, dtype=torch.int32).flip(0),
        "parents": parents,
        "cu_nodes": sizes.cumsum(0).to(torch.int32),
        "inputs": torch.full((requests + 1, width, dim), torch.nan).to(dtype),
        "record_indices": torch.arange(requests, dtype=torch.int32) + 1,
    }
    return {name: None if value is None else value.to(device) for name, value in args.items()}


def on_cpu(args: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu().clone() if torch.is_tensor(value) else value for name, value in args.items()}


def check(module: ModuleType, args: dict[str, Any], **options: Any) -> None:
    """Convolve and commit one path per request; compare both, and everything nobody may write."""
    width = int(args["cu_nodes"].diff().max())
    want = on_cpu(args)
    out = torch.full_like(want["x"], torch.nan)
    reference.conv_tree(**want, out=out, **options)
    got = torch.full_like(args["x"], torch.nan)
    before = args["window"].clone()
    module.conv_tree(**args, width=width, out=got, **options)
    live = torch.repeat_interleave(want["window_indices"] > 0, want["cu_nodes"].diff())
    assert_close("output", out[live], got.cpu()[live], ROUNDED[out.dtype])
    assert got.cpu()[~live].isnan().all(), "output: a padding row was written"
    assert_same_bits("window", before, args["window"])
    assert_same_bits("inputs", want["inputs"], args["inputs"])

    g = torch.Generator().manual_seed(1)
    sizes = want["cu_nodes"].diff().tolist()
    trees = [chain(n) if want["parents"] is None else want["parents"][r, :n].tolist() for r, n in enumerate(sizes)]
    chosen = [path_to(tree, int(torch.randint(-1, len(tree), (1,), generator=g))) for tree in trees]
    path = torch.full((len(trees), 64), 1 << 20, dtype=torch.int32)
    for r, nodes in enumerate(chosen):
        path[r, : len(nodes)] = torch.tensor(nodes, dtype=torch.int32)
    by_path = None if want["parents"] is None else path
    accepted = torch.tensor([len(nodes) for nodes in chosen], dtype=torch.int32)
    commit = (want["window"], want["window_indices"], want["inputs"], want["record_indices"])
    reference.conv_commit(*commit, by_path, accepted)
    device = args["x"].device
    module.conv_commit(
        args["window"], args["window_indices"], args["inputs"], args["record_indices"],
        None if by_path is None else by_path.to(device), accepted.to(device),
    )  # fmt: skip
    assert_same_bits("committed window", want["window"], args["window"])


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_against_the_definition(name: str, dtype: torch.dtype, device: str) -> None:
    check(kernel, case(BATCHES[name], device, dtype=dtype))


@pytest.mark.parametrize(("dim", "taps", "bias"), [(1, 2, True), (257, 3, False), (600, 4, True), (8, 8, False)])
def test_shapes(dim: int, taps: int, bias: bool, device: str) -> None:
    check(kernel, case(BATCHES["mixed"], device, dim=dim, taps=taps, bias=bias))


def test_without_activation(device: str) -> None:
    check(kernel, case(BATCHES["mixed"], device), activation=False)


def test_padding_rows_are_skipped(device: str) -> None:
    args = case(BATCHES["mixed"], device)
    args["window_indices"][1] = 0
    args["window_indices"][2] = -1
    check(kernel, args)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int, device: str) -> None:
    g = torch.Generator().manual_seed(seed)
    trees = [random_tree(int(n), seed + int(n)) for n in torch.randint(1, 24, (4,), generator=g)]
    check(kernel, case(trees, device, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_chain_is_a_tree_of_one_branch(dtype: torch.dtype, device: str) -> None:
    args = case([chain(9), chain(3)], device, dtype=dtype)
    tree = kernel.conv_tree(**args, width=9)
    assert_same_bits("output", tree, kernel.conv_tree(**{**args, "parents": None}, width=9))
    check(kernel, {**args, "parents": None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_committing_then_one_token_is_one_token_after_another(dtype: torch.dtype, device: str) -> None:
    """The last node of each path comes out alike, whether its ancestors were nodes or have been committed."""
    tree = random_tree(14, 5)
    args = case([tree], device, dtype=dtype)
    at_once = kernel.conv_tree(**args, width=14)
    for leaf in range(14):
        *path, last = path_to(tree, leaf)
        one = {**args, "window": args["window"].clone(), "parents": None}
        if path:
            nodes = torch.tensor([path], dtype=torch.int32, device=device)
            accepted = torch.tensor([len(path)], dtype=torch.int32, device=device)
            slots = one["window_indices"], args["inputs"], args["record_indices"]
            kernel.conv_commit(one["window"], *slots, nodes, accepted)
        one |= {"x": args["x"][last : last + 1], "cu_nodes": torch.tensor([0, 1], dtype=torch.int32, device=device)}
        alone = kernel.conv_tree(**{**one, "inputs": None}, width=1)
        assert_same_bits(f"node {leaf}", at_once[leaf : leaf + 1], alone)


@pytest.fixture
def vllms(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """vLLM's module of the convolution with its Triton kernel, also where vLLM would take its CPU one."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    found = importlib.util.find_spec("vllm.model_executor.layers.mamba.ops.causal_conv1d")
    assert found
    assert found.origin
    spec = importlib.util.spec_from_file_location("vllms_causal_conv1d", found.origin)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.undo()
    return module


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],  # the interpreter cannot multiply bfloat16
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_chains_give_the_bits_of_vllms_kernel(dtype: torch.dtype, seed: int, device: str, vllms: ModuleType) -> None:
    lengths = [[16, 16], [1, 16], [7, 3, 16]][seed]
    args = case([chain(n) for n in lengths], device, dtype=dtype, dim=300, bias=seed > 0, seed=seed)
    ours = kernel.conv_tree(**args, width=16)
    kept = args["weight"].shape[1] - 1
    state = torch.zeros(len(args["window"]), kept + 15, 300, dtype=dtype, device=device).transpose(1, 2)
    state[:, :, :kept] = args["window"]
    theirs = vllms.causal_conv1d_update(
        args["x"].clone(), state, args["weight"], args["bias"], "silu", conv_state_indices=args["window_indices"],
        num_accepted_tokens=torch.ones(len(lengths), dtype=torch.int32, device=device),
        query_start_loc=args["cu_nodes"], max_query_len=16,
    )  # fmt: skip
    assert_same_bits("output", theirs, ours)


def test_layouts_that_do_not_fit_are_refused() -> None:
    args = case(BATCHES["chain"])
    for wrong in (
        {"x": args["x"].T.contiguous().T},
        {"window": args["window"][:, :, :1]},
        {"record_indices": None},
        {"inputs": args["inputs"].transpose(0, 1)},
    ):
        with pytest.raises(ConfigError, match="conv_tree"):
            kernel.conv_tree(**{**args, **wrong}, width=16)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("            if TREE:", "            if False:"),  # siblings mixed
        ("(TAPS - 1 - tl.maximum(before, 1))", "(TAPS - 1 - tl.minimum(before, 1))"),
        ("(TAPS - 1 - tl.maximum(before, 1))", "tl.maximum(before, 1)"),
        ("up = tl.where((parent >= 0) & (parent < node), parent, -1)", "up = tl.where(parent >= 0, parent % 2, -1)"),
        ("tl.where(node < 0, before + 1,", "tl.where(node < 0, before,"),
        ("acc / (1 + tl.exp(-acc))", "acc / (1 + tl.exp(acc))"),
        ("(slot <= 0) | (t >=", "(slot < 0) | (t >="),
        ("acc = tl.load(bias + d, mask=inside, other=0)", "acc = tl.load(bias + d, mask=d < 0, other=0)"),
        ("+ t * D + d, own", "+ d, own"),
        ("at = count + j - KEPT", "at = count + j - KEPT - 1"),
        ("(KEPT + at)[:, None] * WINDOW_T", "j[:, None] * WINDOW_T"),
        ("if (slot <= 0) | (count <= 0):", "if slot < 0:"),
        ("node = tl.load(path +", "at + 0 * tl.load(path +"),  # commits in flat order
    ],
)
def test_mutants_fail(old: str, new: str, device: str, tmp_path: Path) -> None:
    args = case([random_tree(17, 1), chain(2), depth_first(random_tree(11, 2)), star(5)], device)
    args["window_indices"][1] = 0
    args["window"][0] = 0.5  # what a padding row would move
    with pytest.raises(AssertionError, match=r"output|window|inputs"):
        check(mutant(kernel, old, new, tmp_path), args)
