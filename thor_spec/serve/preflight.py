"""Whether a start is one of the combinations that are known not to work."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thor_spec import env
from thor_spec.device import board
from thor_spec.errors import PlatformError
from thor_spec.known import combinations
from thor_spec.serve import passthrough
from thor_spec.serve.checkpoint import Checkpoint
from thor_spec.vllm_plugin import compat


def require_packages(architecture: str) -> None:
    """Raise PlatformError, where vLLM's module of this architecture imports a package that is not there.

    Its Qwen3.5 and Qwen3.6 read images, too, and import torchvision for that, whatever is asked of them.
    """
    if "qwen3_5" not in compat.TARGETS.get(architecture, "") or importlib.util.find_spec("torchvision") is not None:
        return
    torch = importlib.metadata.version("torch")
    build = torch.partition("+")[2]
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    raise PlatformError(
        f"vLLM's {architecture} imports torchvision, which is not installed, so the engine would die while it starts. "
        f"Install the one for this torch: `{sys.executable} -m pip install torchvision torch=={torch}{index}`."
    )


def facts(
    target: Checkpoint, *, drafter: bool, context: int, vllm: str, passed: Sequence[str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return what is so about a start.

    Args:
        passed: arguments that go to vLLM, after ours.
        variables: set for the engine, beside those that it inherits.
    """
    given = dict(passthrough.flags(passed))
    method = "dflash" if drafter else _method(given.get("--speculative-config"))

    def variable(name: str) -> str | None:
        return variables.get(name) or env.engine_variable(name)

    found: dict[str, Any] = {
        "board": str(board.detect(Path("/"), None).kind),
        "vllm": vllm,
        "hybrid": target.is_hybrid,
        "drafter": method != "none",
        "method": method,
        "gdn_decode_kernel": variable("VLLM_GDN_DECODE_KERNEL") or "cuda",
        "context": context,
        "prefix_caching": "--enable-prefix-caching" in given,
        "moe_backend": "--moe-backend" in given,
        "graphs": "--enforce-eager" not in given,
        "flashinfer": str(given.get("--attention-backend", "")).upper().startswith("FLASHINFER"),
        "flashinfer_cubins": importlib.util.find_spec("flashinfer_cubin") is not None,
        "kv_dtype": str(given.get("--kv-cache-dtype") or "auto").partition("_")[0],
        "weights": _quantization(target.config),
        "rope": str((target.text_config.get("rope_parameters") or {}).get("rope_type", "default")),
    }
    version = variable("VLLM_FLASH_ATTN_VERSION")
    return found | ({"flash_attention": int(version)} if version and version.isdecimal() else {})


def require_sound(
    found: Mapping[str, Any], asked: Mapping[str, Any], note: Callable[[str], None] | None = None
) -> None:
    """Refuse what will go wrong as ``found``, and tell what is likely to as ``asked`` for. Raises: PlatformError."""
    likely = combinations.matching(asked)
    for combination in combinations.matching(found):
        if combination.refuse:
            raise PlatformError(f"{combination.name}: {combination.describe()}. {combination.remedy}")
        if note and combination in likely:
            note(f"warning: {combination.name}: {combination.describe()}. {combination.remedy}")


def _method(speculation: str | None) -> str:
    """Return the method of a ``--speculative-config`` that is passed on; ``none`` without one."""
    if speculation is None:
        return "none"
    content = passthrough.require_json("--speculative-config", speculation)
    return str(content.get("method", "?")) if isinstance(content, dict) else "?"


def _quantization(config: Mapping[str, Any]) -> str:
    """Return nvfp4, fp8, another method's name, or none."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return "none"
    text = str(quantization).lower()
    if "nvfp4" in text or ("'num_bits': 4" in text and "'float'" in text):
        return "nvfp4"
    return (
        "fp8"
        if "fp8" in text or ("'num_bits': 8" in text and "'float'" in text)
        else str(quantization.get("quant_method", "?"))
    )
