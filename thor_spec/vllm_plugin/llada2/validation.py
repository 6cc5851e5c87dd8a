"""What a request to a LLaDA2 model may ask for; whatever cannot be served rightly is answered with 400."""

from collections.abc import Callable
from typing import Any

from thor_spec.vllm_plugin import compat

MODEL_TYPE = "llada2_moe"


def install() -> None:
    """Put our check in the place of vLLM's, for our model only, once."""
    compat.VALIDATE_DIFFUSION.wrap(for_ours)


def for_ours(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``SamplingParams._validate_diffusion``, which asks us about LLaDA2."""

    def validate(self: Any, model_config: Any) -> None:
        if model_config.is_diffusion and model_config.hf_config.model_type == MODEL_TYPE:
            require_servable(self)
        else:
            stock(self, model_config)

    return validate


def require_servable(params: Any) -> None:
    """Raise vLLM's validation error, naming the parameters of a request that blocks cannot honour."""
    asked = {
        "min_p": params.min_p > 0,
        "min_tokens": params.min_tokens > 0,
        "presence_penalty, frequency_penalty and repetition_penalty": (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        ),
        "logit_bias": bool(params.logit_bias),
        "bad_words": bool(params.bad_words),
        "allowed_token_ids": bool(params.allowed_token_ids),
        "prompt_logprobs": params.prompt_logprobs is not None,
        "logprob_token_ids": bool(getattr(params, "logprob_token_ids", None)),
    }
    if found := [name for name, is_there in asked.items() if is_there]:
        raise compat.VALIDATION_ERROR.resolve()(
            f"{', '.join(found)}: not available with a block-diffusion model, which fills a block in no fixed order. "
            "Leave it out."
        )
