"""Our models: the stock ones, with our model state, and rotary tables of their own where a rope type is asked for.

Each is made when it is asked for, because importing some stock models pulls in packages (torchvision, for the
multimodal Qwen3.5) that a text-only machine may lack.
"""

from contextlib import nullcontext
from typing import Any

from thor_spec.vllm_plugin import compat, drafter_cache, receipt, rope
from thor_spec.vllm_plugin.one_state import choice


def __getattr__(name: str) -> Any:
    if name not in compat.MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stock = compat.model_seam(name).resolve()
    overrides = _target(stock) if name in compat.TARGETS else {"__init__": _build(stock, "drafter")}
    ours = type(name, (stock,), {"__module__": __name__, **overrides})
    globals()[name] = ours
    return ours


def _build(stock: Any, role: str) -> Any:
    hybrid = getattr(stock, "is_hybrid", False)

    def build(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        with receipt.of_failure():
            if role == "drafter":
                drafter_cache.narrow(vllm_config)
            with choice.layers_for(vllm_config) if hybrid else nullcontext():
                stock.__init__(self, vllm_config=vllm_config, prefix=prefix)
            rope.place(self, vllm_config, role)
            if role == "drafter":
                drafter_cache.fit_pages(self)

    return build


def _target(stock: Any) -> dict[str, Any]:
    overrides = {"__init__": _build(stock, "target"), "get_model_state_cls": staticmethod(_model_state_of(stock))}
    if not getattr(stock, "is_hybrid", False):
        return overrides

    # The size of pages comes from this method, the tensors in them from the layers: both or neither.
    def state_shape(_: Any, vllm_config: Any) -> Any:
        return stock.get_mamba_state_shape_from_config(choice.without_speculation(vllm_config))

    return {**overrides, "get_mamba_state_shape_from_config": classmethod(state_shape)}


def _model_state_of(stock: type) -> Any:
    def get_model_state_cls() -> type:
        from thor_spec.vllm_plugin import model_state

        return model_state.ThorHybridModelState if getattr(stock, "is_hybrid", False) else model_state.ThorModelState

    return get_model_state_cls
