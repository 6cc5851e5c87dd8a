"""Relaxation: against its definition on many rows, at every edge, and with what must fail."""

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.kernels.close import assert_same_bits
from tests.kernels.mutants import mutant
from thor_spec.errors import ConfigError
from thor_spec.kernels.relax import kernel, reference

Args = dict[str, torch.Tensor]
TIE = 1e-5  # relative: where the last bits of a probability decide, either answer is right


def case(batch: int, k: int, vocabulary: int, seed: int, device: str = "cpu") -> Args:
    """Rows of requests that draft 0 to ``k`` tokens, of all rules, greedy and not, with tokens masked out."""
    g = torch.Generator().manual_seed(seed)
    counts = [1 + int(torch.randint(0, k + 1, (1,), generator=g)) for _ in range(batch)]
    counts[0] = k + 1
    slots = torch.randperm(batch + 2, generator=g)[:batch]
    rows = sum(counts)
    logits = torch.randn(rows, vocabulary, generator=g) * torch.rand(rows, 1, generator=g) * 8
    logits[torch.rand(rows, vocabulary, generator=g) < torch.rand(rows, 1, generator=g) * 0.9] = -math.inf
    likely = logits.argsort(dim=1, descending=True)[:, : min(4, vocabulary)]
    logits.scatter_add_(1, likely, torch.full(likely.shape, math.log(vocabulary)))  # else none of many is likely
    pick = torch.randint(0, likely.shape[1], (rows,), generator=g)
    drafts = torch.empty(rows, dtype=torch.int64)
    drafts[1:] = likely[torch.arange(rows), pick][:-1]  # row i judges the token of row i + 1
    drafts[0] = 0
    logits[torch.arange(rows), likely[:, 0]] = logits[torch.arange(rows), likely[:, 0]].clamp(min=0)  # one is possible
    drafts[torch.rand(rows, generator=g) < 0.1] = -1
    kinds = torch.randint(0, 4, (batch + 2,), generator=g)
    args = {
        "logits": logits,
        "drafts": drafts,
        "slots": torch.repeat_interleave(slots, torch.tensor(counts)).to(torch.int32),
        "temperature": torch.where(torch.rand(batch + 2, generator=g) < 0.2, 0.0, 0.7),
        "eps": torch.where(kinds == 0, 0.0, 0.01 + 0.4 * torch.rand(batch + 2, generator=g)),
        "delta": torch.where(kinds == 1, math.inf, 0.01 + 0.5 * torch.rand(batch + 2, generator=g)),
        "saved": torch.zeros(rows),
    }
    return {name: tensor.to(device) for name, tensor in args.items()}


def check(module: ModuleType, args: Args) -> torch.Tensor:
    """Return which rows were raised, after comparing all that may change and what may not."""
    want = {name: tensor.cpu().clone() for name, tensor in args.items()}
    exact = {**want, "logits": want["logits"].double()}
    p = reference.lift(**exact)
    got = {name: tensor.clone() for name, tensor in args.items()}
    before = got["logits"].clone()
    taken = module.lift(**got).cpu()
    raised = ~taken.isnan()
    differs = (raised != ~p.isnan()).nonzero().flatten().tolist()
    for row in differs:  # only within the last bits of the threshold
        assert near_threshold(want, row), f"row {row} raised: {bool(raised[row])}, p {p[row]}, {taken[row]}"
    both = raised & ~p.isnan()
    assert torch.allclose(taken[both].double(), p[both], rtol=1e-5), "p"
    rows = raised.nonzero().flatten()
    tokens = want["drafts"][rows + 1]
    expected = before.cpu().clone()
    expected[rows, tokens] = reference.CERTAIN
    assert_same_bits("logits", expected, got["logits"])
    saved = torch.full((len(raised),), math.nan)
    saved[rows] = before.cpu()[rows, tokens]
    assert torch.equal(saved.nan_to_num(nan=-1e9), got["saved"].cpu().nan_to_num(nan=-1e9)), "saved"
    check_settle(module, got, want, before)
    return raised


def check_settle(module: ModuleType, got: Args, want: Args, before: torch.Tensor) -> None:
    """Settle, as after a sampler that took a random number of drafts, and compare logits and counts."""
    slots, rows = torch.unique_consecutive(want["slots"], return_counts=True)
    g = torch.Generator().manual_seed(len(rows))
    sampled = torch.stack([torch.randint(0, n + 1, (), generator=g) for n in rows.tolist()]).to(torch.int32)
    cu_rows = torch.nn.functional.pad(rows.cumsum(0), (1, 0)).to(torch.int32)
    kinds = torch.arange(int(slots.max()) + 1, dtype=torch.int32) % 3
    counts = torch.arange(3 * 4 * 16).view(3, 4, 16)
    device = got["logits"].device
    there = [tensor.to(device, copy=True) for tensor in (cu_rows, slots, kinds, sampled, counts)]
    module.settle(got["logits"], got["drafts"], got["saved"], *there)
    settled = before.cpu().clone()
    saved = got["saved"].cpu()
    reference.settle(settled, want["drafts"], saved, cu_rows, slots, kinds, sampled, counts)
    assert_same_bits("settled logits", before, got["logits"])
    assert torch.equal(counts, there[-1].cpu()), "counts"


def near_threshold(args: Args, row: int) -> bool:
    slot = int(args["slots"][row])
    log_p = args["logits"][row].double().log_softmax(0)
    entropy = -(log_p.exp() * log_p).nan_to_num(nan=0.0).sum()
    threshold = min(float(args["eps"][slot]), float(args["delta"][slot]) * math.exp(-float(entropy)))
    return threshold > 0 and abs(float(log_p[int(args["drafts"][row + 1])].exp()) / threshold - 1) < TIE


@pytest.mark.parametrize("vocabulary", [1, 33, 40, 50, 320, 4096])
def test_many_rows(vocabulary: int, device: str, full: bool) -> None:
    """10,000 with ``--full`` or on a GPU, else 3,000; a sixth of them for each vocabulary, up to 16 drafts each."""
    seen = raised = 0
    batches = [(64, 0), (7, 1), (1, 3), (7, 15), (30, 16), (20, 16)]
    if full or device == "cuda":
        batches += [(64, 7), (64, 16), (64, 16), (64, 16)]
    for seed, (batch, k) in enumerate(batches):
        found = check(kernel, case(batch, k, vocabulary, 100 * vocabulary + seed, device))
        seen, raised = seen + len(found), raised + int(found.sum())
    assert seen >= (10_000 if full or device == "cuda" else 3_000) / 6
    assert 0.05 * seen < raised < 0.7 * seen, "the cases are not worth testing"


def test_rows_that_several_programs_share(device: str) -> None:
    for seed, vocabulary in enumerate((4097, 8192, 20_000)):
        assert check(kernel, case(8, 5, vocabulary, seed, device)).any()


def test_a_vocabulary_of_qwen(device: str) -> None:
    args = case(2, 5, 248_320, 5, device)
    args["eps"].fill_(1e-3)
    args["temperature"].fill_(1.0)
    args["delta"].fill_(math.inf)
    assert check(kernel, args).any()


def test_launches_leave_the_scratch_as_they_found_it(device: str) -> None:
    scratch = kernel.Scratch.allocate(2000, device)
    scratch.parts.fill_(math.nan)
    for seed in range(3):
        args = case(16, 7, 320, seed, device)
        other = {name: tensor.clone() for name, tensor in args.items()}
        assert_same_bits("taken", kernel.lift(**args), kernel.lift(**other, scratch=scratch))
        assert not scratch.arrived.any()


def check_entropy(module: ModuleType, vocabulary: int, device: str) -> None:
    """A row is taken just below ``p exp(H)`` and not just above, so H is right to a thousandth."""
    g = torch.Generator().manual_seed(vocabulary)
    steps = torch.arange(vocabulary) * 8.0 / vocabulary
    draft = vocabulary // 3
    for row in (torch.zeros(vocabulary), steps, -steps, torch.randn(vocabulary, generator=g)):
        log_p = row.double().log_softmax(0)
        even = (log_p[draft] - (log_p.exp() * log_p).sum()).exp()
        for nudge, raised in ((0.999, True), (1.001, False)):
            args = {
                "logits": torch.stack([row, row]),
                "drafts": torch.full((2,), draft),
                "slots": torch.zeros(2, dtype=torch.int32),
                "temperature": torch.ones(1),
                "eps": torch.full((1,), 9.0),
                "delta": (even * nudge).float().view(1),
                "saved": torch.empty(2),
            }
            taken = module.lift(**{name: tensor.to(device) for name, tensor in args.items()})
            assert bool(taken[0].isnan()) != raised, f"entropy {float(log_p.exp() @ -log_p):.3f}"


@pytest.mark.parametrize("vocabulary", [50, 9000, 70_000])
def test_the_entropy_is_right(vocabulary: int, device: str) -> None:
    check_entropy(kernel, vocabulary, device)


def test_exact_requests_are_left_alone(device: str) -> None:
    for field in ("eps", "delta", "temperature"):
        args = case(16, 7, 320, 3, device)
        args[field].zero_()
        assert not check(kernel, args).any()


def test_impossible_drafts_are_never_raised(device: str) -> None:
    args = case(1, 3, 50, 0, device)
    args["temperature"][:], args["eps"][:], args["delta"][:] = 1.0, 1e-30, math.inf
    args["drafts"][1:] = 7
    args["logits"][:, 7] = -math.inf
    assert not check(kernel, args).any()


def test_rows_without_a_possible_token_are_left_alone(device: str) -> None:
    """A grammar may forbid everything; there is no distribution then, and nothing may be taken."""
    args = case(7, 5, 9000, 4, device)
    args["temperature"][:], args["eps"][:], args["delta"][:] = 1.0, 1e-30, math.inf
    empty = torch.arange(0, len(args["logits"]), 2, device=device)
    args["logits"][empty] = -math.inf
    raised = check(kernel, args)
    assert not raised[empty.cpu()].any()
    assert raised.any()


def test_what_does_not_fit_is_refused() -> None:
    args = case(2, 3, 50, 0)
    for wrong in (
        {"logits": args["logits"].half()},
        {"logits": args["logits"].T.contiguous().T},
        {"saved": args["saved"][:2]},
        {"scratch": kernel.Scratch.allocate(1, "cpu")},
    ):
        with pytest.raises(ConfigError, match="relax"):
            kernel.lift(**{**args, **wrong})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.load(drafts + row + 1, mask=has_next", "tl.load(drafts + row, mask=has_next"),  # off by one
        ("(next_slot == slot) & ", ""),  # the token after the last draft judged by the next request's
        (" & (draft >= 0)", ""),
        (" & (tl.load(temperature + slot) != 0)", ""),
        (" & (highest > 0)", ""),
        ("(p > 0) & ", ""),
        ("tl.minimum(highest, factor * tl.exp(-entropy))", "highest"),
        ("tl.minimum(highest, factor * tl.exp(-entropy))", "factor * tl.exp(-entropy)"),
        ("dot = keep * (dot + mass * down)", "dot = keep * dot"),
        ("(dots + masses * down)", "dots"),
        ("tl.exp(own - top) / mass", "tl.exp(own - top)"),
        ("tl.where(takes, own, ", "tl.where(takes, p, "),
        ("tl.store(logits + (first + t) * STRIDE", "tl.store(logits + first * STRIDE"),
        ("tl.load(sampled + r).to(tl.int32) - 1", "tl.load(sampled + r).to(tl.int32)"),
        ("mask=lifted & (t < accepted)", "mask=lifted"),
        ("(t == accepted) & (accepted < drafted)", "(t == accepted)"),
        ("tl.load(kinds + tl.load(slots + r))", "tl.load(kinds + r)"),
        ("tl.store(arrived + row, 0)", "tl.store(arrived + row, 1)"),
    ],
)
def test_mutants_fail(old: str, new: str, device: str, tmp_path: Path) -> None:
    module = mutant(kernel, old, new, tmp_path)
    with pytest.raises(AssertionError):  # noqa: PT012
        if "dot" in old:
            check_entropy(module, 70_000, device)
        for seed in range(3):
            args = case(16, 5, 320, seed, device)
            if "draft >= 0" in old:
                args["eps"][:], args["delta"][:] = 1e-30, math.inf
                args["drafts"][:2] = 0  # so that what is hit is the row before
            elif "p > 0" in old:  # a threshold that vanishes
                args["eps"][:], args["delta"][:] = 0.1, 1e-45
                args["drafts"][1:] = 3
                args["logits"][:, 3] = -math.inf
            scratch = module.Scratch.allocate(1000, device)
            got = {name: tensor.clone() for name, tensor in args.items()}
            first = module.lift(**got, scratch=scratch).clone()
            got = {name: tensor.clone() for name, tensor in args.items()}
            assert_same_bits("a second launch", first, module.lift(**got, scratch=scratch))
            check(module, args)
