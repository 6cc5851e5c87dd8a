"""Our target models: the stock ones, with our model state.

Each is made when it is asked for, because importing some stock models pulls in packages (torchvision, for the
multimodal Qwen3.5) that a text-only machine may lack.
"""

from typing import Any

from thor_spec.vllm_plugin import compat


def __getattr__(name: str) -> Any:
    if name not in compat.TARGETS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stock = compat.target_seam(name).resolve()
    ours = type(name, (stock,), {"__module__": __name__, "get_model_state_cls": staticmethod(_model_state_of(stock))})
    globals()[name] = ours
    return ours


def _model_state_of(stock: type) -> Any:
    def get_model_state_cls() -> type:
        from thor_spec.vllm_plugin import model_state

        return model_state.ThorHybridModelState if getattr(stock, "is_hybrid", False) else model_state.ThorModelState

    return get_model_state_cls
