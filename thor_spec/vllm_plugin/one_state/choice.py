"""Whether an engine keeps one state per sequence, decided from its configuration before anything is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from thor_spec.errors import ConfigError
from thor_spec.kernels.tree_paths.reference import MAX_NODES
from thor_spec.vllm_plugin import compat
from thor_spec.vllm_plugin.one_state.measured import fastest
from thor_spec.vllm_plugin.options import PluginOptions
from thor_spec.vllm_plugin.seam import has_gpu_build

Kernel = Literal["replay", "wy", "native", "torch"]
LAYER = "QwenGatedDeltaNetAttention"  # by its class name vLLM looks for a replacement


def reconstructs(vllm_config: Any) -> bool:
    """Return whether states are reconstructed on commit: whenever a hybrid speculates, unless something forbids it.

    Raises: ConfigError, if ``state`` asks for it where it cannot be.
    """
    wanted = PluginOptions.parse(vllm_config.additional_config).state
    if vllm_config.speculative_config is None or wanted == "snapshot":
        return False
    why = obstacle(vllm_config)
    if why and wanted == "reconstruct":
        raise ConfigError(f"--state reconstruct does not work with {why}. Leave that out, or take --state snapshot.")
    return why is None


def obstacle(vllm_config: Any) -> str | None:
    """Return what keeps this configuration from one state per sequence; None where nothing does.

    Asks only for what is settled when vLLM sizes its pages, since the answer must never change after that.
    """
    parallel = vllm_config.parallel_config
    drafts = vllm_config.speculative_config.num_speculative_tokens
    found = {
        f"{drafts} drafts: the kernels verify at most {MAX_NODES - 1}": drafts + 1 > MAX_NODES,
        "pipeline parallelism: a step's result comes after later steps were prepared": parallel.pipeline_parallel_size
        > 1,
        **cut_batches(parallel),
        "a KV connector: it takes states during the forward pass, before they are committed": (
            vllm_config.kv_transfer_config is not None
        ),
        "LoRA, which takes another path through the layer": vllm_config.lora_config is not None,
        "this GPU: the layer is written for CUDA and the CPU": has_gpu_build() and torch.version.cuda is None,
    }
    return next((why for why, applies in found.items() if applies), None)


def cut_batches(parallel: Any) -> dict[str, bool]:
    """Return which ways of cutting a batch or its contexts apart are on; no step of ours knows any of them."""
    sizes = (getattr(parallel, f"{phase}_context_parallel_size", 1) for phase in ("decode", "prefill"))
    return {
        "context parallelism": max(sizes) > 1,
        "micro-batches (DBO)": bool(getattr(parallel, "enable_dbo", False)),
    }


def kernel(vllm_config: Any) -> Kernel:
    """Return what verifies drafts.

    ``auto`` is the fastest lossless one on a GPU, see ``measured``. On a CPU, where our kernels are interpreted, it is
    vLLM's own operators; those know no trees, which a CPU verifies in torch.
    """
    options = PluginOptions.parse(vllm_config.additional_config)
    if options.gdn_kernel != "auto":
        return options.gdn_kernel
    if has_gpu_build():
        return fastest()
    return "native" if options.tree_shape is None else "torch"


def described(vllm_config: Any) -> str:
    """Return, for READY, what vLLM's own states are per sequence."""
    speculation = vllm_config.speculative_config
    drafts = speculation.num_speculative_tokens if speculation else 0
    return f"{drafts + 1} per sequence (snapshot)" if drafts else "one per sequence"


def without_speculation(vllm_config: Any) -> Any:
    """Return the configuration as it looks to what computes the shape of a state: one state, and its window."""
    return _Plain(vllm_config) if reconstructs(vllm_config) else vllm_config


class _Plain:
    speculative_config = None

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vllm_config, name)


@contextmanager
def layers_for(vllm_config: Any) -> Iterator[None]:
    """Have vLLM build our layer in the place of its own, inside this context, where the engine reconstructs."""
    registry: dict[str, type] = compat.OOT_LAYERS.resolve()
    if LAYER in registry:  # a model inside of ours
        yield
        return
    if not reconstructs(vllm_config):
        _say_why_not(vllm_config)
        yield
        return
    from thor_spec.vllm_plugin.one_state.layer import ReconstructedGDN

    compat.PLUGGABLE_LAYER.resolve().register_oot(ReconstructedGDN, name=LAYER)
    try:
        yield
    finally:
        del registry[LAYER]


def _say_why_not(vllm_config: Any) -> None:
    if vllm_config.speculative_config is None:
        return
    if PluginOptions.parse(vllm_config.additional_config).state != "snapshot" and (why := obstacle(vllm_config)):
        compat.LOG.warning("A state is kept for every draft position (--state snapshot), because of %s.", why)
