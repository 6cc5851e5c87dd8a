"""When a drafted token is taken: exactly, from a threshold on, or from one that falls with the target's uncertainty.

For each draft d, with the target's distribution p after the whole sampling pipeline and a token y ~ p::

    accept d if d == y, or if p(d) >= threshold;  threshold = eps, or min(eps, delta exp(-H(p)))
    emit y where d is not accepted, and a sampled token after the last draft

With the threshold off this is exact: tokens are distributed as without drafts. With it on they are not, whatever the
temperature: at a position, the emitted law is d for certain if the threshold takes it, and p itself if not. Greedy
requests are never relaxed.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from thor_spec.errors import ConfigError

if TYPE_CHECKING:
    import torch  # the launcher reads rules too, and starts without torch

Rule = Literal["exact", "threshold", "typical"]
RULES: tuple[Rule, ...] = get_args(Rule)
EPS, DELTA = 0.09, 0.3
_LARGEST = sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """One request's rule. Source: arXiv:2401.10774, whose published runs use eps 0.09 and delta 0.3."""

    rule: Rule = "exact"
    eps: float = EPS
    """A probability; a draft at least this likely is taken. 0 or less: exact."""
    delta: float = DELTA
    """Lowers the threshold to ``delta exp(-H)``, H in nats; only with ``typical``. 0 or less: exact."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(f"accept={self.rule!r} is not one of {', '.join(RULES)}.")
        for name, value in {"accept_eps": self.eps, "accept_delta": self.delta}.items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not -_LARGEST <= value <= 1:
                raise ConfigError(f"{name}={value!r} must be a number of at most 1; 0 or less turns relaxation off.")

    @property
    def is_exact(self) -> bool:
        """Whether tokens are distributed as without drafts."""
        return self.rule == "exact" or self.eps <= 0 or (self.rule == "typical" and self.delta <= 0)

    @property
    def numbers(self) -> tuple[float, float]:
        """``eps`` and ``delta`` as the kernel takes them: (0, 0) is exact, an infinite delta leaves ``eps`` alone."""
        if self.is_exact:
            return 0.0, 0.0
        return self.eps, math.inf if self.rule == "threshold" else self.delta

    @property
    def described(self) -> str:
        """The rule in words, as answers are labelled with it."""
        if self.is_exact:
            return "exact"
        eps = f"{self.rule} eps={self.eps:g}"
        return eps if self.rule == "threshold" else f"{eps} delta={self.delta:g}"

    def of_request(self, given: Mapping[str, Any]) -> "Acceptance":
        """Return the rule of a request that says ``accept``, ``accept_eps`` or ``accept_delta``; this one otherwise.

        Raises: ConfigError, naming the field.
        """
        known = {"accept": "rule", "accept_eps": "eps", "accept_delta": "delta"}
        if unknown := sorted(set(given) - set(known)):
            raise ConfigError(f"thor_spec has no option {', '.join(unknown)}. Known: {', '.join(known)}.")
        mine = {field: getattr(self, field) for field in known.values()}
        return Acceptance(**{**mine, **{known[name]: value for name, value in given.items()}})


def accept(p: "torch.Tensor", drafts: Sequence[int], y: Sequence[int], acceptance: Acceptance) -> list[int]:
    """Return the emitted tokens: the accepted drafts and one of the target's own.

    Args:
        p: the target's distribution at each draft and after the last one [K + 1, V].
        drafts: K tokens.
        y: a token drawn from each row of ``p``, K + 1.
    """
    eps, delta = acceptance.numbers
    tokens: list[int] = []
    for row, draft, own in zip(p, drafts, y, strict=False):
        possible = row[row > 0]
        entropy = -(possible * possible.log()).sum()
        threshold = min(eps, delta * math.exp(-float(entropy)))
        likely = threshold > 0 and 0 < float(row[draft]) >= threshold
        if draft != own and not likely:
            return [*tokens, own]
        tokens.append(draft)
    return [*tokens, y[len(tokens)]]
