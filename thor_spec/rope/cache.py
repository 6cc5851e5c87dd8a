"""A scheme's cosines and sines as an engine keeps them: one row per position, cosines of all pairs, then sines."""

import torch

from thor_spec.rope.scheme import Scheme

CHUNK_ROWS = 1 << 16  # a million positions of 64 in double precision would take half a gigabyte at once
_ANGLE_ERROR = 2.0**-22
"""Relative error of an angle that was computed in single precision: of frequency, position and their product."""


def rows(scheme: Scheme, start: int, stop: int, rotary_dim: int, theta: float, context: int) -> torch.Tensor:
    """Return the rows of positions ``start`` to ``stop`` [stop - start, rotary_dim], float64, on the CPU.

    Args:
        context: longest sequence of the engine, in tokens.
    """
    frequencies = scheme.frequencies(rotary_dim, theta, context)
    positions = torch.arange(start, stop, dtype=torch.float64, device="cpu")
    if scheme.type == "identity_beyond_native":
        positions[positions >= scheme.native] = 0.0  # which is where a rotation is the identity
    inverse = torch.tensor(frequencies.inverse, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, inverse)
    return frequencies.scale * torch.cat((angles.cos(), angles.sin()), dim=-1)


def fill(out: torch.Tensor, scheme: Scheme, theta: float, context: int, default: torch.Tensor | None = None) -> None:
    """Write the scheme's table into ``out`` [positions, rotary_dim], of any dtype, on any device.

    Args:
        default: the engine's own table of the same shape. Where the scheme keeps the native context, its rows are
            taken over, so that not even their rounding differs.
    """
    kept = 0
    if default is not None and scheme.keeps_native:
        kept = len(out) if scheme.type == "default" else min(scheme.native, len(out))
        out[:kept].copy_(default[:kept])
    for start in range(kept, len(out), CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, len(out))
        out[start:stop].copy_(rows(scheme, start, stop, out.shape[1], theta, context))


def excess(table: torch.Tensor, scheme: Scheme, theta: float, context: int) -> float:
    """Return by how much ``table`` [positions, rotary_dim] is further from the scheme than rounding explains.

    Rounding is that of the table's dtype; where ``fill`` takes an engine's own rows over, also that of angles in single
    precision, which grows with the position. Above 0, or infinite, for a table that is not the scheme's.
    """
    frequencies = scheme.frequencies(table.shape[1], theta, context)
    inverse = torch.tensor(frequencies.inverse * 2, dtype=torch.float64, device="cpu")
    worst = -1.0
    for start in range(0, len(table), CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, len(table))
        wanted = rows(scheme, start, stop, table.shape[1], theta, context)
        allowed = torch.full_like(wanted, frequencies.scale * torch.finfo(table.dtype).eps)
        if scheme.keeps_native:
            positions = torch.arange(start, stop, dtype=torch.float64, device="cpu")
            if scheme.type != "default":
                positions[positions >= scheme.native] = 0.0
            allowed += torch.outer(positions, inverse) * _ANGLE_ERROR
        off = (table[start:stop].cpu().double() - wanted).abs() - allowed
        worst = max(worst, float(off.nan_to_num(nan=torch.inf).max()))
    return worst
