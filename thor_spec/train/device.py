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


def forgive_compiler() -> None:
    """Run what cannot be compiled as it is, and allow a layer as many variants as there are kinds and lengths."""
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001
    torch._dynamo.config.suppress_errors = True  # noqa: SLF001


def autocast(device: torch.device) -> Any:
    """Return the context of a training step: bf16 products on a GPU, float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def compile_layers(layers: Iterable[nn.Module], say: Say) -> None:
    """Compile each layer on its own: layers of one kind share the code, and the first step waits for two of them."""
    forgive_compiler()
    for layer in layers:
        layer.compile(dynamic=False)
    say("layers will be compiled on first use")


def as_it_is(compiled: bool) -> Any:
    """Return a context in which compiled layers run uncompiled: for what is too rare to be worth compiling."""
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
