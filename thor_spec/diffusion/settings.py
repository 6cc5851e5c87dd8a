"""How boldly a block is denoised: the two thresholds, the bounds on steps, and the published modes.

Source: arXiv:2602.08676 (modes quality and speed, editing), arXiv:2512.15745 (2.0).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thor_spec.errors import ConfigError

MAX_STEPS, MAX_QUIET_STEPS = 64, 16
MODES: Mapping[str, tuple[float, float | None]] = {"quality": (0.7, 0.5), "speed": (0.5, 0.0), "2.0": (0.95, None)}
"""Mode -> confidence above which a mask is filled, and above which a token is replaced; None: never."""
FIELDS = ("mode", "threshold", "edit_threshold", "max_denoise_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoising:
    """One request's settings. A mask is filled, or a token replaced, when the model is surer than the threshold."""

    threshold: float = MODES["quality"][0]
    """A probability."""
    edit_threshold: float | None = MODES["quality"][1]
    """A probability; None, or 1 or more, edits nothing."""
    max_steps: int = MAX_STEPS
    """In the last one, every mask that is left is filled."""

    def __post_init__(self) -> None:
        for name, value in {"threshold": self.threshold, "edit_threshold": self.edit_threshold}.items():
            if value is None and name == "edit_threshold":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
                raise ConfigError(f"{name}={value!r} must be a probability, a number in 0..1.")
        steps = self.max_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MAX_STEPS:
            raise ConfigError(
                f"max_denoise_steps={steps!r} must be a whole number in 1..{MAX_STEPS}: each step fills a mask at "
                f"least, and {MAX_QUIET_STEPS} more may edit."
            )

    @property
    def edit_bound(self) -> float:
        """``edit_threshold`` as a number that no probability exceeds where nothing is edited."""
        return math.inf if self.edit_threshold is None else self.edit_threshold

    @property
    def described(self) -> str:
        """The settings in words, as answers are labelled with them."""
        edit = "off" if self.edit_bound >= 1 else f"{self.edit_threshold:g}"
        steps = f" max_denoise_steps={self.max_steps}" if self.max_steps != MAX_STEPS else ""
        return f"threshold={self.threshold:g} edit_threshold={edit}{steps}"

    def of_request(self, given: Mapping[str, Any]) -> "Denoising":
        """Return the settings of a request that names some of ``FIELDS``; a mode gives both thresholds first.

        An ``edit_threshold`` of 1 turns editing off.

        Raises: ConfigError, naming the field.
        """
        if unknown := sorted(set(given) - set(FIELDS)):
            raise ConfigError(f"thor_spec has no option {', '.join(unknown)}. Known: {', '.join(FIELDS)}.")
        threshold, edit = self.threshold, self.edit_threshold
        if "mode" in given:
            mode = given["mode"]
            if not isinstance(mode, str) or mode not in MODES:
                raise ConfigError(f"mode={mode!r} is not one of {', '.join(MODES)}.")
            threshold, edit = MODES[mode]
        return Denoising(
            threshold=given.get("threshold", threshold),
            edit_threshold=given.get("edit_threshold", edit),
            max_steps=given.get("max_denoise_steps", self.max_steps),
        )
