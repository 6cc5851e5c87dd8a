"""Verify rows of any length leave the state that rows of full length leave, as far as anybody may look."""

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from thor_spec.vllm_plugin import compat, cpu_verify, seam

pytestmark = pytest.mark.skipif(seam.has_gpu_build(), reason="not run: only the CPU build has this function")

H, HV, D, WIDTH, K = 2, 4, 128, 4, 7
DIM = 2 * H * D + HV * D


@dataclasses.dataclass
class Metadata:
    num_spec_decodes: int
    spec_query_start_loc: torch.Tensor
    spec_state_indices_tensor: torch.Tensor
    num_accepted_tokens: torch.Tensor


def windows(slots: int) -> torch.Tensor:
    """Return convolution windows [slots, DIM, columns], channels side by side as operators for AMX want them."""
    return torch.randn(slots, WIDTH - 1 + K, DIM).bfloat16().transpose(1, 2)


def layer() -> Any:
    weight = torch.randn(DIM, 1, WIDTH).bfloat16() * 0.3
    plain = weight.view(DIM, WIDTH)
    if torch.cpu._is_amx_tile_supported():  # as vLLM does when it has loaded a layer
        from vllm import _custom_ops

        weight = _custom_ops.causal_conv1d_weight_pack(plain)
    conv = SimpleNamespace(weight=weight, bias=None, _cpu_unpacked_conv_weight=plain)

    def rearrange(mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = mixed.split([H * D, H * D, HV * D], dim=-1)
        return tuple(x.reshape(1, len(mixed), -1, D).contiguous() for x in (q, k, v))

    return SimpleNamespace(
        conv1d=conv,
        activation="silu",
        A_log=torch.rand(HV).log(),
        dt_bias=torch.randn(HV).bfloat16(),
        rearrange_mixed_qkv=rearrange,
    )


def run(forward: Any, net: Any, x: Any, lengths: list[int], accepted: list[int], conv: Any, ssm: Any) -> torch.Tensor:
    rows = len(lengths)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    slots = torch.arange(rows * (K + 1), dtype=torch.int32).view(rows, K + 1)
    metadata = Metadata(rows, starts, slots, torch.tensor(accepted, dtype=torch.int32))
    mixed, b, a = (torch.cat([part[i, :n] for i, n in enumerate(lengths)]) for part in x)
    return forward(net, metadata, mixed, b, a, conv, ssm, WIDTH, WIDTH - 1 + K)


@pytest.mark.parametrize("seed", range(6))
def test_short_rows_equal_the_head_of_full_rows(seed: int) -> None:
    torch.manual_seed(seed)
    stock = inspect.unwrap(compat.CPU_SPEC_FORWARD.resolve())
    ours = cpu_verify.padded(stock, torch)
    net, rows = layer(), 3
    conv = windows(rows * (K + 1))
    ssm = torch.randn(rows * (K + 1), HV, D, D) * 0.1

    def inputs() -> tuple[torch.Tensor, ...]:
        shapes = ((rows, K + 1, DIM), (rows, K + 1, HV), (rows, K + 1, HV))
        return tuple(torch.randn(shape).bfloat16() for shape in shapes)

    lengths = torch.randint(1, K + 2, (rows,)).tolist()
    accepted = torch.randint(1, K + 2, (rows,)).tolist()
    first, second = inputs(), inputs()
    states = [(conv.clone(), ssm.clone()) for _ in range(2)]
    short = run(ours, net, first, lengths, accepted, *states[0])
    full = run(stock, net, first, [K + 1] * rows, accepted, *states[1]).view(rows, K + 1, HV, D)
    assert torch.equal(short, torch.cat([full[i, :n] for i, n in enumerate(lengths)]))
    # Whatever of those rows is accepted, the next step sees the same.
    kept = [int(torch.randint(1, n + 1, ())) for n in lengths]
    after = [run(stock, net, second, [K + 1] * rows, kept, *state) for state in states]
    assert torch.equal(*after)


def test_vllm_still_needs_it() -> None:
    """When this fails, upstream was fixed: drop the seam."""
    torch.manual_seed(0)
    stock = inspect.unwrap(compat.CPU_SPEC_FORWARD.resolve())
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("not run: CPUs with AMX take another path")
    conv = windows(K + 1)
    ssm = torch.randn(K + 1, HV, D, D)
    x = tuple(torch.randn(1, K + 1, n).bfloat16() for n in (DIM, HV, HV))
    with pytest.raises(RuntimeError, match="size of tensor"):
        run(stock, layer(), x, [K - 2], [K + 1], conv, ssm)
