"""Sampling where random cases say too little: many tokens, bfloat16, and top-k and top-p, which no interpreter runs."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.plugin.runner_kernels.batch import INF, poison
from tests.plugin.runner_kernels.cases.logprobs import ranks
from tests.plugin.runner_kernels.cases.sampling import gumbel_launch
from tests.plugin.runner_kernels.launch import INTERPRETED, OURS, Launch, assert_same
from thor_spec.vllm_plugin.runner_kernels import noise
from thor_spec.vllm_plugin.seam import Seam

pytestmark = INTERPRETED


@pytest.mark.parametrize(
    ("count", "mode"),
    [
        (1000, dict(USE_FP64=False, IS_DRAFTING=False, APPLY_TEMPERATURE=False)),
        (250, dict(USE_FP64=False, IS_DRAFTING=True, APPLY_TEMPERATURE=True)),
        (250, dict(USE_FP64=True, IS_DRAFTING=False, APPLY_TEMPERATURE=False)),
    ],
    ids=["target", "drafter", "float64"],
)
def test_many_tokens_are_sampled_the_same(count: int, mode: dict[str, bool]) -> None:
    def build(rng: np.random.Generator) -> Launch:
        made = gumbel_launch(rng, count, 320, 1024)
        maximum = made.args["local_max_ptr"].to(torch.float64 if mode["USE_FP64"] else torch.float32)
        return Launch(made.grid, made.args | mode | {"local_max_ptr": maximum})

    want = assert_same("_gumbel_sample_kernel", build, seed=count)
    assert len(want.args["local_argmax_ptr"].unique()) > 80


@triton.jit
def draw(out, seeds, offsets, count: tl.constexpr):  # noqa: ANN001, ANN201
    i = tl.arange(0, count)
    tl.store(out + i, tl.maximum(tl.rand(tl.load(seeds + i), tl.load(offsets + i)), 4.6566127342e-10))


@pytest.mark.parametrize("high", [2**20, 2**31, 2**40])
def test_uniform_numbers_are_tritons(high: int) -> None:
    rng, count = np.random.default_rng(high), 4096
    seeds, offsets = rng.integers(-(2**63), 2**63 - 1, count), rng.integers(0, high, count)
    want = poison(count, dtype=torch.float32)
    draw[(1,)](want, torch.from_numpy(seeds), torch.from_numpy(offsets), count)
    assert torch.equal(torch.from_numpy(noise.philox_uniform(seeds, offsets)), want)


def test_ranks_in_bfloat16() -> None:
    """The interpreter cannot say: it compares bfloat16 by its bits, in which negative numbers are the larger."""
    args = ranks(np.random.default_rng(1)).args
    args["logits_ptr"] = args["logits_ptr"].bfloat16()
    outputs = []
    for logits in (args["logits_ptr"], args["logits_ptr"].float()):
        OURS["_ranks_kernel"](**args | {"logits_ptr": logits})
        outputs.append(args["output_ptr"].clone())
    assert torch.equal(*outputs)


def cut(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Launch the replacement as vLLM's sampler does."""
    rows, vocab = logits.shape
    OURS["_topk_topp_kernel"](
        LOGITS=logits,
        LOGITS_STRIDE_0=logits.stride(0),
        BUFFER=None,
        PERCENTILE_TO_STD_TABLE=None,
        NORMAL_CDF_TO_SIGMA_TABLE=None,
        K=logits if k is None else k,
        P=logits if p is None else p,
        BATCH_SIZE=rows,
        VOCAB_SIZE=vocab,
        MASK_VALUE=-INF,
        BLOCK_SIZE=256,
        BLOCK_SIZE_TRUNC=128,
        TOPK_ENABLED=k is not None,
        TOPP_ENABLED=p is not None,
        SPLIT_COVERS_PONLY=False,
        num_warps=4,
    )
    return logits


REFERENCE = Seam(
    target="vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p_pytorch",
    signature=("logits", "k", "p", "allow_cpu_sync"),
    why="compare top-k and top-p, whose kernel the interpreter cannot run",
    drop_when="the interpreter runs it",
)


@pytest.mark.parametrize("which", ["k", "p", "kp"])
def test_top_k_and_top_p_are_vllms_torch_version(which: str) -> None:
    random = torch.Generator().manual_seed(len(which))
    logits = torch.randn(200, 90, generator=random) * 3
    logits[::3] = logits[::3].masked_fill(torch.rand(67, 90, generator=random) < 0.5, -INF)
    k = torch.randint(1, 91, (200,), generator=random, dtype=torch.int32) if "k" in which else None
    p = torch.rand(200, generator=random) if "p" in which else None
    if p is not None:
        p[::5] = 1.0
    want = REFERENCE.resolve()(logits.clone(), k, p)
    assert torch.equal(cut(logits.clone(), k, p), want)


def test_of_equal_logits_the_first_stay() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert cut(logits, torch.tensor([2], dtype=torch.int32), None).isfinite().tolist() == [
        [False, True, True, False, False]
    ]
