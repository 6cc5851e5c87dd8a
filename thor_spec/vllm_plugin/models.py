"""Our target models: the stock ones, with our model state.

Each is made when it is asked for, because importing some stock models pulls in packages (torchvision, for the
multimodal Qwen3.5) that a text-only machine may lack.
"""

from typing import Any

from thor_spec.vllm_plugin import compat, receipt
from thor_spec.vllm_plugin.one_state import choice


def __getattr__(name: str) -> Any:
    if name not in compat.TARGETS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stock = compat.target_seam(name).resolve()
    ours = type(name, (stock,), {"__module__": __name__, **_overrides(stock)})
    globals()[name] = ours
    return ours


def _overrides(stock: Any) -> dict[str, Any]:
    overrides: dict[str, Any] = {"get_model_state_cls": staticmethod(_model_state_of(stock))}
    if not getattr(stock, "is_hybrid", False):
        return overrides

    def build(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        with receipt.of_failure(), choice.layers_for(vllm_config):
            stock.__init__(self, vllm_config=vllm_config, prefix=prefix)

    # The size of pages comes from this method, the tensors in them from the layers: both or neither.
    def state_shape(_: Any, vllm_config: Any) -> Any:
        return stock.get_mamba_state_shape_from_config(choice.without_speculation(vllm_config))

    return {
        **overrides,
        "__init__": build,
        "get_mamba_state_shape_from_config": classmethod(state_shape),
    }


def _model_state_of(stock: type) -> Any:
    def get_model_state_cls() -> type:
        from thor_spec.vllm_plugin import model_state

        return model_state.ThorHybridModelState if getattr(stock, "is_hybrid", False) else model_state.ThorModelState

    return get_model_state_cls
