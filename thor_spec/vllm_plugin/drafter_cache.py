"""What the drafter's own cache takes: a window of the tokens, where one is asked for, in blocks of the target's bytes.

Of layers that slide only the tail of a step is kept; see ``drafter_tail``.

vLLM pads every block of the pool to the widest layer's. With a drafter of more KV heads than the target's that is the
drafter's, and each recurrent state, which fills a block alone, is padded to twice its bytes. Fewer tokens in a block of
the drafter need no padding.
"""

import dataclasses
from typing import Any

from thor_spec.dflash.drafter import require_window
from thor_spec.vllm_plugin.one_state import choice
from thor_spec.vllm_plugin.options import PluginOptions


def narrow(vllm_config: Any) -> None:
    """Have all layers of the drafter that is about to be built slide over ``drafter_window`` tokens.

    The block that is drafted sees itself in both directions, and of what is before it as much as the window reaches.

    Raises: ConfigError, for a window that is too short, or a drafter that has sliding layers of its own.
    """
    window = PluginOptions.parse(vllm_config.additional_config).drafter_window
    if window is None:
        return
    speculation = vllm_config.speculative_config
    config = speculation.draft_model_config.hf_config
    dflash = dict(getattr(config, "dflash_config", None) or {})
    asked = {"use_swa": True, "swa_window_size": window}
    if dflash.items() >= asked.items():  # by us: the model is built again
        return
    require_window(window, speculation.num_speculative_tokens, config.to_dict())
    config.dflash_config = dflash | asked


def fit_pages(drafter: Any) -> None:
    """Have the attention layers of a drafter that was built ask for blocks of as many bytes as all others have."""
    layers = [module for module in drafter.modules() if hasattr(module, "get_kv_cache_spec")]
    names = {layer.layer_name for layer in layers}
    for layer in layers:
        layer.get_kv_cache_spec = _Fitted(layer.get_kv_cache_spec, layer.attn_backend, names)


class _Fitted:
    """``Attention.get_kv_cache_spec`` of one layer."""

    def __init__(self, stock: Any, backend: Any, names: set[str]) -> None:
        self._stock = stock
        self._backend = backend
        self._names = names

    def __call__(self, vllm_config: Any) -> Any:
        spec = self._stock(vllm_config)
        if not wanted(vllm_config) or spec is None:
            return spec
        from thor_spec.vllm_plugin.drafter_tail import tail_of  # here, since it takes vLLM's scheduler along

        spec = tail_of(spec, vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        others = (
            layer.get_kv_cache_spec(vllm_config)
            for name, layer in layers.items()
            if name not in self._names and hasattr(layer, "get_kv_cache_spec")
        )
        page = max((other.page_size_bytes for other in others if other is not None), default=0)
        block = fitting_block(spec.block_size, spec.page_size_bytes, page)
        if block is None or not self._backend.supports_block_size(block):
            return spec
        return dataclasses.replace(spec, block_size=block)


def wanted(vllm_config: Any) -> bool:
    """Return whether the drafter's blocks may have fewer tokens than the target's.

    Only beside states: without them vLLM pads nothing. Not where prefixes are cached: vLLM would then look for hits at
    the drafter's finer boundaries, where no state is.
    """
    hybrid = vllm_config.model_config.is_hybrid and choice.reconstructs(vllm_config)
    return hybrid and not vllm_config.cache_config.enable_prefix_caching


def fitting_block(block: int, own_page: int, page: int) -> int | None:
    """Return the tokens of a block of ``page`` bytes; None where ``block`` fits, or nothing does evenly.

    Args:
        block: tokens of a block of ``own_page`` bytes, which is what vLLM would take.
    """
    if page <= 0 or own_page <= page or own_page % page or block % (own_page // page):
        return None
    return block // (own_page // page)
