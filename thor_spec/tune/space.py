"""Which problem is tuned, and which configurations of vLLM's fused-expert kernel are tried."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from thor_spec.capacity.shape import count_experts
from thor_spec.errors import ConfigError

Launch = Mapping[str, int]
TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048)
_SIZES = {
    "BLOCK_SIZE_M": (16, 32, 64, 128),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (64, 128, 256),
    "GROUP_SIZE_M": (1, 16, 32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
_THOR = (11, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The experts of one layer, as one device has them."""

    experts: int
    chosen: int
    """Experts of a token."""
    hidden: int
    intermediate: int
    """Of one expert, on one device."""

    @classmethod
    def of(cls, config: Mapping[str, Any], tensor_parallel: int = 1) -> "Problem":
        """Read a ``config.json``. Raises: ConfigError, for a model without experts or with quantized ones."""
        text = config.get("text_config") or config
        experts = count_experts(text)
        if not experts or "moe_intermediate_size" not in text:
            raise ConfigError("The model has no experts, so there is nothing to tune.")
        if config.get("quantization_config"):
            raise ConfigError(
                "The model's weights are quantized, and vLLM runs such experts on kernels without these files, or on "
                "other ones. Tune the checkpoint in bf16."
            )
        inner = int(text["moe_intermediate_size"])
        if inner % tensor_parallel:
            raise ConfigError(f"Experts of {inner} cannot be shared by {tensor_parallel} devices.")
        return cls(
            experts=experts,
            chosen=int(text["num_experts_per_tok"]),
            hidden=int(text["hidden_size"]),
            intermediate=inner // tensor_parallel,
        )

    def as_dict(self) -> dict[str, int]:
        """Return the fields, JSON-ready."""
        return asdict(self)


def launches(tokens: int, capability: Sequence[int]) -> Iterator[Launch]:
    """Yield the configurations worth trying for a batch of ``tokens``, small ones first.

    On Thor (sm_110) at most 3 stages and 4 warps: what is larger hung or did not fit there.
    """
    sizes = dict(_SIZES)
    if tuple(capability) == _THOR:
        sizes |= {"num_warps": (4,), "num_stages": (2, 3)}
    # A tile holds rows of one expert; more rows than tokens are always empty.
    sizes["BLOCK_SIZE_M"] = tuple(size for size in sizes["BLOCK_SIZE_M"] if size == 16 or size < 2 * tokens)
    if tokens <= min(sizes["BLOCK_SIZE_M"]):
        sizes["GROUP_SIZE_M"] = (1,)  # there is one row of tiles, so there is nothing to group
    for values in product(*sizes.values()):
        yield dict(zip(sizes, values, strict=True))
