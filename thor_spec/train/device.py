"""How the models use the device: precision, and compiled layers where a compiler is at hand."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from thor_spec.train.loop import Say


def prepare(device: str) -> None:
    """Let float32 products on a GPU use TF32; on a CPU, compute on one thread, so that a seed gives the same bytes."""
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    else:
        torch.set_num_threads(1)


def autocast(device: torch.device) -> Any:
    """Return the context of a training step: bf16 products on a GPU, float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def compile_layers(layers: Iterable[nn.Module], say: Say) -> None:
    """Compile each layer on its own: layers of one kind share the code, and the first step waits for two of them."""
    import torch._dynamo

    torch._dynamo.config.cache_size_limit = 64  # noqa: SLF001  # two kinds, two lengths, with and without gradients
    torch._dynamo.config.suppress_errors = True  # noqa: SLF001  # what cannot be compiled runs as it is
    for layer in layers:
        layer.compile(dynamic=False)
    say("layers will be compiled on first use")
