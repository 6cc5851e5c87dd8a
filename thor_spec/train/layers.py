"""Layers that both nano models are built of, and experts computed all at once."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Norm(nn.Module):
    """RMS norm; ``offset`` 1 stores the distance from one, as Qwen3-Next does."""

    def __init__(self, size: int, epsilon: float, offset: float = 0.0) -> None:
        super().__init__()
        self.epsilon, self.offset = epsilon, offset
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        return functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), self.epsilon).to(x.dtype)


def rotary_angles(positions: Tensor, size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [..., 1, size / 2] in float32 for ``positions`` [...]; ``size`` dimensions rotate."""
    half = size // 2
    frequency = theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angle = positions[..., None, None].float() * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of ``x`` [..., heads, D] in pairs (i, i + size / 2); the others pass."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """All experts as one wide SwiGLU whose inner units are scaled by their expert's weight, 0 for those not chosen.

    A token pays for every expert; that is faster than gathering while experts are this small. Rows of ``gate`` and
    ``up``, and columns of ``down``, belong to the experts in turn.
    """

    def __init__(self, hidden: int, experts: int, intermediate: int) -> None:
        super().__init__()
        self.experts, self.intermediate = experts, intermediate
        self.gate = nn.Parameter(torch.empty(experts * intermediate, hidden))
        self.up = nn.Parameter(torch.empty(experts * intermediate, hidden))
        self.down = nn.Parameter(torch.empty(hidden, experts * intermediate))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return [..., hidden]; ``weights`` [..., experts] float32."""
        inner = functional.silu(functional.linear(x, self.gate)) * functional.linear(x, self.up)
        scaled = inner.unflatten(-1, (self.experts, self.intermediate)) * weights[..., None].to(inner.dtype)
        return functional.linear(scaled.flatten(-2), self.down)

    def export(self, prefix: str) -> dict[str, Tensor]:
        """Return the weights under their published names, expert by expert."""
        tensors = {}
        for expert in range(self.experts):
            rows = slice(expert * self.intermediate, (expert + 1) * self.intermediate)
            tensors[f"{prefix}{expert}.gate_proj.weight"] = self.gate.detach()[rows]
            tensors[f"{prefix}{expert}.up_proj.weight"] = self.up.detach()[rows]
            tensors[f"{prefix}{expert}.down_proj.weight"] = self.down.detach()[:, rows]
        return tensors

    def take(self, prefix: str, tensors: dict[str, Tensor]) -> None:
        """Load what ``export`` returned, removing it from ``tensors``."""
        with torch.no_grad():
            for expert in range(self.experts):
                rows = slice(expert * self.intermediate, (expert + 1) * self.intermediate)
                self.gate[rows] = tensors.pop(f"{prefix}{expert}.gate_proj.weight").to(self.gate)
                self.up[rows] = tensors.pop(f"{prefix}{expert}.up_proj.weight").to(self.up)
                self.down[:, rows] = tensors.pop(f"{prefix}{expert}.down_proj.weight").to(self.down)


def initialize(model: nn.Module, layers: int) -> None:
    """Draw every matrix: scale 1 / sqrt(inputs), and what writes into the residual stream smaller by its depth."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or "conv1d" in name:
            continue
        if "embed" in name:
            nn.init.normal_(parameter, std=0.5)
        else:
            scale = parameter.shape[1] ** -0.5
            writes = name.endswith(("down", "down_proj.weight", "out_proj.weight", "o_proj.weight", "dense.weight"))
            is_head = name.startswith("lm_head")
            nn.init.normal_(parameter, std=scale * (0.3 if is_head else (2 * layers) ** -0.5 if writes else 1.0))
