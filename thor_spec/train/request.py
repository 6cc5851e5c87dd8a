"""What ``thor-spec train drafter`` was asked for, checked before anything heavy is imported."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from thor_spec.errors import ConfigError

LEAST_BLOCK = 4  # half the steps use half blocks, and a block of 1 drafts nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for; None takes a default that fits the target."""

    target: Path
    text: Path
    out: Path
    minutes: float | None = None
    steps: int | None = None
    layers: int | None = None
    block: int = 16
    sequences: int | None = None
    new_tokens: int = 320
    mask_token_id: int | None = None
    seed: int = 1
    device: str | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("minutes", "steps", "layers", "sequences"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(
                    f"--{name} {value:g} must be above 0: nothing could be trained. Leave it out for the default."
                )
        if self.block < LEAST_BLOCK:
            raise ConfigError(
                f"--block {self.block} must be at least {LEAST_BLOCK}: half the steps train half a block, and a block "
                "of 1 drafts nothing. Raise --block."
            )
        if self.new_tokens <= self.block:
            raise ConfigError(
                f"--new-tokens {self.new_tokens} must be above --block {self.block}: every continuation has to hold a "
                "whole block and the token before it. Raise --new-tokens or lower --block."
            )
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"--device {self.device} is not one to train on. Take cuda, cuda:N or cpu.")
