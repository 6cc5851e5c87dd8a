"""The gated delta rule over whole sequences: chunk by chunk for training, token by token as the definition.

    S_t = a_t S_{t-1} + b_t (v_t - a_t S_{t-1} k_t) k_t^T,   o_t = S_t q_t,   a_t = exp(log_decay_t)

Inside a chunk the corrected values solve a unit lower-triangular system (the WY form), so only chunks follow one
another. Everything is computed in the dtype of the inputs; float32 with TF32 products is meant for training.
Sources: arXiv:2412.06464 (rule), arXiv:2406.06484 (chunkwise form).

Shapes: B sequences, T tokens, H value heads, K key size, V value size, N chunks of C tokens, G = B * H.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def recurrent(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, log_decay_BTH: Tensor, beta_BTH: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, T, H, V] and the last state [B, H, K, V], one token at a time.

    Args:
        q_BTHK: normalized and scaled queries; k_BTHK: normalized keys.
        log_decay_BTH: at most 0.
        beta_BTH: write strength in [0, 1].
        state_BHKV: before the first token; left as it is.
    """
    state, outputs = state_BHKV, []
    for t in range(q_BTHK.shape[1]):
        q, k, v = q_BTHK[:, t], k_BTHK[:, t], v_BTHV[:, t]
        state = state * log_decay_BTH[:, t].exp()[..., None, None]
        recalled = torch.einsum("bhk,bhkv->bhv", k, state)
        written = beta_BTH[:, t][..., None] * (v - recalled)
        state = state + torch.einsum("bhk,bhv->bhkv", k, written)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q, state))
    return torch.stack(outputs, dim=1), state


def chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Return what ``recurrent`` returns, ``chunk`` tokens at a time; differentiable."""
    batch, tokens, heads, _ = q_BTHK.shape
    padding = -tokens % chunk  # a padded token neither decays nor writes

    def split(x: Tensor) -> Tensor:  # [B, T, H, ...] -> [G, N, C, ...]
        x = functional.pad(x, (*((0, 0) * (x.ndim - 2)), 0, padding)) if padding else x
        x = x.unflatten(1, (-1, chunk))
        return x.movedim(3, 1).flatten(0, 1)

    q, k, v, beta = split(q_BTHK), split(k_BTHK), split(v_BTHV), split(beta_BTH)
    gamma = split(log_decay_BTH).cumsum(dim=-1)
    below = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    # Masked before the exponential: above the diagonal the differences are positive, and may overflow.
    ratio = (gamma[..., :, None] - gamma[..., None, :]).masked_fill(~below, -torch.inf).exp()
    keyed = k * beta[..., None]
    system = ((keyed @ k.mT) * ratio).tril(-1)
    inverse = UnitLowerInverse.apply(system)
    values = inverse @ (v * beta[..., None])
    erased = inverse @ (keyed * gamma.exp()[..., None])
    last = gamma[..., -1:]
    written, entering, state = scan(
        values.contiguous(),
        erased.contiguous(),
        (k * (last - gamma).exp()[..., None]).contiguous(),
        last[..., 0].exp(),
        state_BHKV.flatten(0, 1).contiguous(),
    )
    out = (q * gamma.exp()[..., None]) @ entering + ((q @ k.mT) * ratio) @ written
    out = out.unflatten(0, (batch, heads)).movedim(1, 3).flatten(1, 2)
    return out[:, :tokens], state.unflatten(0, (batch, heads))


class UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower-triangular A [..., C, C]."""

    @staticmethod
    def forward(context: Any, a: Tensor) -> Tensor:
        inverse = _unit_lower_inverse(a)
        context.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (inverse,) = context.saved_tensors
        return -(inverse.mT @ gradient @ inverse.mT).tril(-1)


def _unit_lower_inverse(a: Tensor) -> Tensor:
    """Return (I + A)^-1: by squaring up to 16 x 16, where powers stay small, and by halves beyond."""
    size = a.shape[-1]
    if size > 16:
        half = size // 2
        first, second = _unit_lower_inverse(a[..., :half, :half]), _unit_lower_inverse(a[..., half:, half:])
        corner = -second @ a[..., half:, :half] @ first
        upper = torch.cat([first, torch.zeros_like(corner.mT)], dim=-1)
        return torch.cat([upper, torch.cat([corner, second], dim=-1)], dim=-2)
    identity = torch.eye(size, dtype=a.dtype, device=a.device)
    power, inverse, reached = -a, identity - a, 2
    while reached < size:  # (I - A)(I + A^2)(I + A^4)...
        power = power @ power
        inverse = inverse + inverse @ power
        reached *= 2
    return inverse


def _scan(values: Tensor, erased: Tensor, keys: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the state over the chunks.

    Args:
        values: [G, N, C, V]; erased: [G, N, C, K]; keys: [G, N, C, K], decayed to the end of their chunk.
        decay: [G, N], of a whole chunk.
        state: [G, K, V].

    Returns: corrected values [G, N, C, V], the state before each chunk [G, N, K, V], the last state [G, K, V].
    """
    written = torch.empty_like(values)
    entering = torch.empty((*decay.shape, *state.shape[1:]), dtype=state.dtype, device=state.device)
    for n in range(values.shape[1]):
        entering[:, n] = state
        written[:, n] = torch.baddbmm(values[:, n], erased[:, n], state, alpha=-1)
        state = torch.baddbmm(state * decay[:, n, None, None], keys[:, n].mT, written[:, n])
    return written, entering, state.clone()


def _scan_fake(
    values: Tensor, erased: Tensor, keys: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    del erased, keys
    return torch.empty_like(values), values.new_empty((*decay.shape, *state.shape[1:])), torch.empty_like(state)


def _scan_backward(
    erased: Tensor, keys: Tensor, decay: Tensor, d_written: Tensor, d_entering: Tensor, d_state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the values [G, N, C, V], of the state after each chunk [G, N, K, V], and of the first."""
    d_values, d_after = torch.empty_like(d_written), torch.empty_like(d_entering)
    for n in reversed(range(d_written.shape[1])):
        d_after[:, n] = d_state
        d_values[:, n] = torch.baddbmm(d_written[:, n], keys[:, n], d_state)
        passed = torch.addcmul(d_entering[:, n], d_state, decay[:, n, None, None])
        d_state = torch.baddbmm(passed, erased[:, n].mT, d_values[:, n], alpha=-1)
    return d_values, d_after, d_state.clone()


def _scan_backward_fake(
    erased: Tensor, keys: Tensor, decay: Tensor, d_written: Tensor, d_entering: Tensor, d_state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    del erased, keys, decay
    return torch.empty_like(d_written), torch.empty_like(d_entering), torch.empty_like(d_state)


# Operators of their own: a compiler that traced the loops would unroll every chunk.
scan = torch.library.custom_op("thor_spec::delta_scan", mutates_args=())(_scan)
scan.register_fake(_scan_fake)
_scan_gradients = torch.library.custom_op("thor_spec::delta_scan_backward", mutates_args=())(_scan_backward)
_scan_gradients.register_fake(_scan_backward_fake)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    _, erased, keys, decay, _ = inputs
    written, entering, _ = output
    ctx.save_for_backward(erased, keys, decay, written, entering)


def _differentiate(ctx: Any, d_written: Tensor, d_entering: Tensor, d_state: Tensor) -> tuple[Tensor, ...]:
    erased, keys, decay, written, entering = ctx.saved_tensors
    d_values, d_after, d_first = _scan_gradients(
        erased, keys, decay, d_written.contiguous(), d_entering.contiguous(), d_state.contiguous()
    )
    return (
        d_values,
        -(d_values @ entering.mT),
        written @ d_after.mT,
        (d_after * entering).sum(dim=(-1, -2)),
        d_first,
    )


scan.register_autograd(_differentiate, setup_context=_keep)


def convolve(x_BTD: Tensor, weight_DJ: Tensor, window_BPD: Tensor | None = None) -> Tensor:
    """Return SiLU of the causal depthwise convolution; ``window_BPD`` holds the J - 1 inputs before the first."""
    width = weight_DJ.shape[1]
    before = x_BTD.new_zeros(x_BTD.shape[0], width - 1, x_BTD.shape[2]) if window_BPD is None else window_BPD
    padded = torch.cat([before, x_BTD], dim=1)
    tokens = x_BTD.shape[1]
    total = sum(padded[:, j : j + tokens] * weight_DJ[:, j] for j in range(width))
    return functional.silu(total)
