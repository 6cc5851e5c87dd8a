"""LLaDA2's configuration, for transformers and vLLM: what checkpoints leave unsaid, and what the engine must be."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from thor_spec.diffusion import layout
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import compat, receipt
from thor_spec.vllm_plugin.llada2 import validation

SCHEDULER = "thor_spec.vllm_plugin.llada2.scheduler.block_scheduler"


class LLaDA2MoeConfig(PretrainedConfig):
    """``config.json`` of a LLaDA2.x checkpoint."""

    model_type = validation.MODEL_TYPE

    def __init__(self, **given: Any) -> None:
        # vLLM knows a diffusion model by this field.
        given.setdefault("canvas_length", layout.block_of(given))
        given["mask_token_id"] = layout.mask_of(given)
        given["use_rmsnorm"] = True  # of queries and keys; the layers that we share default to another norm
        given.setdefault("embedding_dropout", 0.0)
        theta, scaling = given.pop("rope_theta", 10_000.0), given.pop("rope_scaling", None)
        default = {"rope_type": "default", "rope_theta": theta, **(scaling or {})}
        given["rope_parameters"] = given.get("rope_parameters") or default
        given["rope_parameters"].setdefault("partial_rotary_factor", given.get("partial_rotary_factor", 1.0))
        super().__init__(**given)


class EngineConfig:
    """What vLLM calls to check and complete a configuration."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Nothing is left to do after :class:`LLaDA2MoeConfig`."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Set blocks, scheduler and KV blocks. Raises: ConfigError, naming what does not work."""
        with receipt.of_failure():
            _settle(vllm_config)


def _settle(vllm_config: Any) -> None:
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    block = int(model.hf_config.canvas_length)
    unsupported = {
        "speculation: its blocks are drafts already": vllm_config.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "LoRA": vllm_config.lora_config is not None,
        "KV transfer": vllm_config.kv_transfer_config is not None,
    }
    if found := [what for what, is_there in unsupported.items() if is_there]:
        raise ConfigError(f"LLaDA2 is served without {'; '.join(found)}. Leave it out.")
    if model.max_model_len % block or model.max_model_len < block:
        raise ConfigError(
            f"The context of {model.max_model_len} tokens is no multiple of the block of {block}, and a block is "
            f"computed as a whole. Take {max(model.max_model_len // block, 1) * block}: --context."
        )
    budget = vllm_config.scheduler_config.max_num_batched_tokens
    if budget < block:
        raise ConfigError(f"--max-num-batched-tokens {budget} is less than a block. Take at least {block}.")
    if getattr(vllm_config.compilation_config.cudagraph_mode, "name", None) == "FULL":
        raise ConfigError(
            "cudagraph_mode FULL captures prompts as well, which are taken apart anew in every step. "
            "Take FULL_AND_PIECEWISE, the default, or FULL_DECODE_ONLY."
        )
    _settle_attention(vllm_config.attention_config)
    if not cache.user_specified_block_size:
        cache.block_size = block
        cache.user_specified_block_size = True
    if cache.enable_prefix_caching and cache.block_size % block:
        raise ConfigError(
            f"With KV blocks of {cache.block_size} tokens a cached prefix could end inside a block of {block}, whose "
            f"keys depend on what follows. Take a multiple: --block-size {block}, or --no-enable-prefix-caching."
        )
    if vllm_config.diffusion_config is None:
        vllm_config.diffusion_config = compat.DIFFUSION_CONFIG.resolve()(canvas_length=block)
    if vllm_config.diffusion_config.canvas_length != block:
        raise ConfigError(f"The checkpoint's blocks have {block} tokens; leave out --diffusion-config.")
    vllm_config.scheduler_config.scheduler_cls = SCHEDULER


def _settle_attention(attention: Any) -> None:
    name = getattr(attention.backend, "name", None)
    if name == "FLASHINFER":
        raise ConfigError(
            "FlashInfer sizes its buffers by requests, and a prompt is taken apart into a row per block. "
            "Take --attention-backend FLASH_ATTN or TRITON_ATTN."
        )
    attention.use_non_causal = True
    if attention.flash_attn_version is None:
        # Version 3 plans into a buffer sized by requests; 4 is what vLLM takes for causality that varies by request.
        attention.flash_attn_version = 2


def register() -> None:
    """Make the configuration known, and let requests choose temperature and seed. Safe to call again."""
    AutoConfig.register(validation.MODEL_TYPE, LLaDA2MoeConfig, exist_ok=True)
    compat.MODELS_CONFIG_MAP.resolve()[compat.LLADA2] = EngineConfig
    validation.install()
