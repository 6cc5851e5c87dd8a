"""How many tokens to draft, by what it has brought: acceptance falls and steps grow dearer with depth and batch.

Each length is an arm of a bandit, 0 is no drafts. A situation (depth and batch, roughly) keeps for every arm the tokens
that a sequence gained in a step, older steps counting less, and the step's time. The arm with the most tokens per
second is drawn; another must beat it by a margin. Arms that are not drawn are probed: rarely, and the more rarely the
longer they lose, so that what probing costs is bounded whatever they cost.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

TRIED = 16
"""Steps of an arm before it is judged; also those of a probe."""
MEMORY = 64
"""Steps over which an arm's past fades by e."""
MARGIN = 0.03
"""By which another arm must be faster, as a share."""
FIRST_WAIT, LONGEST_WAIT = 256, 4096
"""Steps of a situation between probes of one arm; doubled by each probe that it loses."""
UNSEEN = 3
"""Times ``TRIED`` that an arm is drawn without a step to judge it by, before it is left."""
Situation = tuple[int, int]
_NEAREST = 1024  # tokens; below, depth hardly matters


def arms(draft_tokens: int, most: int) -> tuple[int, ...]:
    """Return the lengths to choose from, ascending: none, K, and then K/2, K/4, … down to 3, ``most`` in all."""
    halves = [draft_tokens >> i for i in range(1, draft_tokens.bit_length()) if draft_tokens >> i >= 3]
    return tuple(sorted({0, draft_tokens, *halves[: max(0, most - 2)]}))


def situation(depth: float, batch: int) -> Situation:
    """Return the class of a step: its depth in powers of two, and its batch, exact up to 4 and then likewise.

    Args:
        depth: mean tokens of a sequence.
        batch: sequences.
    """
    return (int(depth) // _NEAREST).bit_length(), batch if batch <= 4 else 2 + (batch - 1).bit_length()


def least_depth(number: int) -> int:
    """Return the smallest depth of a situation's first part, in tokens."""
    return _NEAREST << (number - 1) if number else 0


@dataclass(slots=True)
class _Arm:
    """What one length has brought in one situation."""

    weight: float = 0.0  # steps, faded
    tokens: float = 0.0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=2 * TRIED))
    wait: int = FIRST_WAIT
    idle: int = 0  # steps since it was drawn

    @property
    def rate(self) -> float:
        """Tokens per second. By the median of times: a step may have compiled, or shared the machine."""
        return self.tokens / self.weight / statistics.median(self.times) if self.times else 0.0

    def add(self, tokens: float, seconds: float) -> None:
        fade = 1 - 1 / MEMORY
        self.weight = self.weight * fade + 1
        self.tokens = self.tokens * fade + tokens
        self.times.append(seconds)

    def forget(self) -> None:
        """Keep the rate, and let it count for half as much as a probe."""
        weight = min(self.weight, TRIED / 2)
        self.tokens *= weight / self.weight if self.weight else 0.0
        self.weight = weight
        self.times = deque(list(self.times)[-TRIED // 2 :], maxlen=2 * TRIED)

    def copy(self) -> "_Arm":
        """Return one that starts from what this one knows."""
        found = _Arm(self.weight, self.tokens, self.times.copy())
        found.forget()
        return found


@dataclass(slots=True)
class _Place:
    """One situation: its arms, which one is drawn, and which is being tried."""

    arms: dict[int, _Arm]
    best: int
    trying: int | None = None
    left: int = 0  # observations of the one being tried
    patience: int = 0
    untried: list[int] = field(default_factory=list)


class Lengths:
    """Chooses before every step, and hears of it afterwards."""

    def __init__(self, arms: Sequence[int]) -> None:
        self.arms = tuple(sorted(arms))
        self._places: dict[Situation, _Place] = {}

    def choose(self, where: Situation) -> int:
        """Return how many tokens each sequence shall draft."""
        place = self._places.get(where) or self._new(where)
        if place.trying is None and place.untried:
            self._try(place, place.untried.pop())
        if place.trying is None:
            for length, arm in place.arms.items():
                if length == place.best:
                    continue
                arm.idle += 1
                if arm.idle >= arm.wait and place.trying is None:
                    self._try(place, length)
        else:
            place.patience -= 1
            if place.patience < 0:  # no step of it could be judged
                self._lost(place.arms[place.trying])
                place.trying = None
        return place.best if place.trying is None else place.trying

    def observe(self, where: Situation, length: int, tokens: float, seconds: float) -> None:
        """Hear of a step that verified and drafted ``length`` tokens per sequence.

        Args:
            tokens: that a sequence gained, on average.
            seconds: that the step took.
        """
        place = self._places.get(where)
        if place is None or length not in place.arms:
            return
        place.arms[length].add(tokens, seconds)
        if length == place.trying:
            place.left -= 1
            if place.left > 0:
                return
            place.trying = None
        elif place.trying is not None:
            return
        self._judge(place, probed=length if length != place.best else None)

    def _judge(self, place: _Place, probed: int | None) -> None:
        known = {length: arm for length, arm in place.arms.items() if arm.weight}
        fastest = max(known, key=lambda length: known[length].rate)
        if fastest != place.best and known[fastest].rate > (1 + MARGIN) * place.arms[place.best].rate:
            place.best = fastest
            for arm in place.arms.values():  # what won may lose again soon
                arm.wait, arm.idle = FIRST_WAIT, 0
        elif probed is not None:
            self._lost(place.arms[probed])

    def _lost(self, arm: _Arm) -> None:
        arm.wait = min(2 * arm.wait, LONGEST_WAIT)

    def _try(self, place: _Place, length: int) -> None:
        arm = place.arms[length]
        arm.idle = 0
        arm.forget()
        place.trying, place.left, place.patience = length, TRIED, UNSEEN * TRIED

    def _new(self, where: Situation) -> _Place:
        """Begin with what the nearest situation knows; with nothing known, try every arm, the longest first."""
        near = min(self._places, key=lambda other: _distance(where, other), default=None)
        if near is None:
            place = _Place({length: _Arm() for length in self.arms}, best=self.arms[-1], untried=list(self.arms))
        else:
            known = self._places[near]
            place = _Place({length: arm.copy() for length, arm in known.arms.items()}, known.best)
            place.untried = [length for length in self.arms if length != place.best]
        self._places[where] = place
        return place


def _distance(one: Situation, other: Situation) -> tuple[int, int]:
    return abs(one[1] - other[1]), abs(one[0] - other[0])
