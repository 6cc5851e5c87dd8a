"""Our models: the stock ones, with our model state, and rotary tables of their own where a rope type is asked for.

Each is made when it is asked for, because importing some stock models pulls in packages (torchvision, for the
multimodal Qwen3.5) that a text-only machine may lack.
"""

from typing import Any

from thor_spec.vllm_plugin import compat, receipt, rope


def __getattr__(name: str) -> Any:
    if name not in compat.MODELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    stock = compat.model_seam(name).resolve()
    role = "target" if name in compat.TARGETS else "drafter"

    def build(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        stock.__init__(self, vllm_config=vllm_config, prefix=prefix)
        with receipt.of_failure():
            rope.place(self, vllm_config, role)

    overrides: dict[str, Any] = {"__module__": __name__, "__init__": build}
    if role == "target":
        overrides["get_model_state_cls"] = staticmethod(_model_state_of(stock))
    ours = type(name, (stock,), overrides)
    globals()[name] = ours
    return ours


def _model_state_of(stock: type) -> Any:
    def get_model_state_cls() -> type:
        from thor_spec.vllm_plugin import model_state

        return model_state.ThorHybridModelState if getattr(stock, "is_hybrid", False) else model_state.ThorModelState

    return get_model_state_cls
