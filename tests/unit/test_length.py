"""The choice of how many tokens to draft, against simulated costs and acceptance."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from thor_spec.dflash import length
from thor_spec.dflash.length import Lengths, arms, situation

ARMS = (0, 3, 7)
SHALLOW, DEEP = situation(500, 1), situation(50_000, 1)
Step = Callable[[int], tuple[float, float]]
"""Of an arm: the tokens of one step, and its seconds."""


def world(accepted: float, seed: int = 0, *, verify: float = 0.05, draft: float = 0.1, noise: float = 0.02) -> Step:
    """Drafts pass with probability ``accepted`` each; a step costs 1, and more with each draft."""
    rng = random.Random(seed)

    def step(drafts: int) -> tuple[float, float]:
        passed = next((i for i in range(drafts) if rng.random() > accepted), drafts)
        cost = 1 + (draft + verify * drafts if drafts else 0)
        return 1 + passed, cost * rng.lognormvariate(0, noise)

    return step


def play(lengths: Lengths, step: Step, steps: int, where: tuple[int, int] = SHALLOW) -> tuple[Counter[int], float]:
    """Return how often each arm was drawn, and the tokens per second of all steps."""
    drawn: Counter[int] = Counter()
    tokens = seconds = 0.0
    for _ in range(steps):
        chosen = lengths.choose(where)
        got, took = step(chosen)
        lengths.observe(where, chosen, got, took)
        drawn[chosen] += 1
        tokens, seconds = tokens + got, seconds + took
    return drawn, tokens / seconds


def rate(step: Step, arm: int) -> float:
    steps = [step(arm) for _ in range(20_000)]
    return sum(t for t, _ in steps) / sum(s for _, s in steps)


@pytest.mark.parametrize("accepted", [0.0, 0.05, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_it_finds_the_fastest_arm(accepted: float, seed: int) -> None:
    rates = {arm: rate(world(accepted), arm) for arm in ARMS}
    drawn, reached = play(Lengths(ARMS), world(accepted, seed), 8000)
    near = [arm for arm in ARMS if rates[arm] > 0.95 * max(rates.values())]
    assert sum(drawn[arm] for arm in near) > 0.9 * 8000
    assert reached > 0.96 * max(rates.values())


@pytest.mark.parametrize("seed", range(4))
def test_it_is_never_below_plain_decoding_by_more_than_it_probes(seed: int) -> None:
    """Drafts that never pass, at the price of a step; and drafts that are worth just what they cost."""
    dear = world(0.0, seed, draft=1.0)
    drawn, _ = play(Lengths(ARMS), dear, 8000)
    assert drawn[0] > 0.97 * 8000
    even = world(0.2, seed, verify=0.02, draft=0.2)
    _, reached = play(Lengths(ARMS), even, 8000)
    assert reached > 0.97 * rate(even, 0)


def test_what_probing_costs_falls() -> None:
    lengths, step = Lengths(ARMS), world(0.0)
    first, _ = play(lengths, step, 4000)
    later, _ = play(lengths, step, 40_000)
    assert later.total() - later[0] < 2.2 * (first.total() - first[0])
    assert later.total() - later[0] > 0  # or it would never learn that drafts pass again


def test_it_follows_a_change() -> None:
    lengths = Lengths(ARMS)
    play(lengths, world(0.9), 3000)
    drawn, _ = play(lengths, world(0.0), 800)
    assert drawn[0] > 400
    drawn, _ = play(lengths, world(0.9), 6000)
    assert drawn[7] > 4000


def test_depths_and_batches_are_told_apart() -> None:
    """Good drafts in short contexts, bad ones in long ones; each keeps what it knows while the other is played."""
    lengths = Lengths(ARMS)
    for _ in range(6):
        play(lengths, world(0.9), 300, SHALLOW)
        play(lengths, world(0.0), 300, DEEP)
    assert play(lengths, world(0.9), 200, SHALLOW)[0][7] > 150
    assert play(lengths, world(0.0), 200, DEEP)[0][0] > 150
    assert situation(500, 1) == situation(1023, 1) != situation(1024, 1)
    assert len({situation(500, n) for n in (1, 2, 3, 4, 5)}) == 5
    assert situation(500, 5) == situation(500, 8) != situation(500, 9)
    assert [length.least_depth(situation(depth, 1)[0]) for depth in (0, 1024, 5000)] == [0, 1024, 4096]


def test_a_new_depth_begins_with_what_the_nearest_knows() -> None:
    lengths = Lengths(ARMS)
    play(lengths, world(0.0), 1000, SHALLOW)
    drawn, _ = play(lengths, world(0.0), 100, situation(2000, 1))
    assert drawn[0] >= 100 - (len(ARMS) - 1) * length.TRIED


@pytest.mark.parametrize("seed", range(3))
def test_steps_that_took_long_for_another_reason_do_not_decide(seed: int) -> None:
    """Each arm's first step compiles; and now and then somebody else has the machine."""
    step, rng, first = world(0.9, seed), random.Random(seed), set(ARMS)

    def disturbed(drafts: int) -> tuple[float, float]:
        tokens, seconds = step(drafts)
        slow = 100 if drafts in first else 10 if rng.random() < 0.02 else 1
        first.discard(drafts)
        return tokens, seconds * slow

    drawn, _ = play(Lengths(ARMS), disturbed, 2000)
    assert drawn[7] > 0.9 * 2000


def test_an_arm_whose_steps_cannot_be_judged_is_left() -> None:
    """A prompt runs beside every step, say: nothing is observed, and the longest stays drawn."""
    lengths = Lengths(ARMS)
    drawn = Counter(lengths.choose(SHALLOW) for _ in range(5000))
    assert drawn[7] > 0.9 * 5000


@pytest.mark.parametrize(
    ("drafts", "most", "found"),
    [(7, 4, (0, 3, 7)), (15, 4, (0, 3, 7, 15)), (15, 3, (0, 7, 15)), (15, 2, (0, 15)), (3, 4, (0, 3)), (1, 4, (0, 1))],
)
def test_arms(drafts: int, most: int, found: tuple[int, ...]) -> None:
    assert arms(drafts, most) == found
