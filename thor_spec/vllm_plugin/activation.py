"""Check every seam, then apply every registration; ``activate`` is what vLLM runs in each of its processes."""

import gc
import os

from thor_spec.vllm_plugin import compat, forking, receipt, scheduling
from thor_spec.vllm_plugin.seam import has_gpu_build
from thor_spec.vllm_plugin.tree import hook

_MODELS = "thor_spec.vllm_plugin.models"


def activate() -> None:
    """Register our models under the stock architecture names, and mend the scheduler. Safe to call again.

    Raises: PlatformError or SeamMovedError, which stop vLLM's start; nothing is registered then.
    """
    with receipt.of_failure():
        version = compat.require_seams()
    registry = compat.MODEL_REGISTRY.resolve()
    for architecture in compat.MODELS:
        # By name, so that importing a model stays the business of the process that runs it.
        registry.register_model(architecture, f"{_MODELS}:{architecture}")
    for architecture, place in compat.OWN_MODELS.items():
        registry.register_model(architecture, place)
    from thor_spec.vllm_plugin.llada2 import registration  # of vLLM's own, which only now are known to be there

    registration.register()
    scheduling.install(version)  # an engine may be forked from any process, and is not asked again then
    hook.install()
    if not has_gpu_build():
        forking.install()
    receipt.leave(receipt.Receipt(pid=os.getpid(), state="active", vllm=version))
    # vLLM collects garbage some ten times while it loads a model, and half a second each time goes into looking through
    # what was imported. None of that is garbage. ``server`` has kept the collector off until here.
    gc.freeze()
    gc.enable()
