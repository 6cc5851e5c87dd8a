"""The choice of ``--tree auto``: costs that are learnt, trust in drafts, and what comes out of both in a simulation."""

import math
import random
from itertools import accumulate

import pytest

from thor_spec.ddtree import best_first
from thor_spec.ddtree.budget import Costs, Trust, blend, tree_or_chain
from thor_spec.ddtree.cost_table import RECENT, CostTable
from thor_spec.ddtree.tree import chain
from thor_spec.ddtree.walk import walk

SIZES = (1, 2, 4, 7, 12)


def test_seeds_are_read_between_rows_and_contexts() -> None:
    table = CostTable(SIZES)
    for rows in (1, 4):
        for context in (256, 4096):
            table.seed(rows, context, tuple(rows * (1 + context / 4096) * (1 + n / 10) for n in SIZES))
    middle = table.at(2, 3000).verify
    assert middle == pytest.approx([2 * (1 + 3072 / 4096) * (1 + n / 10) for n in SIZES])
    assert table.at(9, 100_000).verify == table.at(4, 4096 * 2).verify == pytest.approx([8 + 0.8 * n for n in SIZES])


def test_whole_steps_are_passes_and_what_is_beside_them() -> None:
    table = CostTable(SIZES)
    table.seed(1, 256, (1.0, 1.1, 1.2, 1.3, 1.4))
    table.seed(1, 4096, (2.0, 2.3, 2.6, 2.9, 3.2))
    for _ in range(500):
        table.learn(1, 100, 4, 3.6)
        table.learn(1, 100, 5, 99.0)  # no size of ours
    assert table.at(1, 100).verify == pytest.approx((3.4, 3.5, 3.6, 3.7, 3.8))
    assert table.at(1, 4096).verify == pytest.approx((3.95, 4.175, 4.4, 4.625, 4.85), abs=0.3)  # as far off as there
    for _ in range(500):
        table.learn(1, 100, 12, 2.0)  # cannot be: more nodes are never cheaper
    fitted = table.at(1, 100).verify
    assert list(fitted) == sorted(fitted)
    assert table.counts() == (0, 0, RECENT, 0, RECENT)


def test_a_host_that_hides_what_nodes_cost() -> None:
    """Passes differ by a lot, one of them because somebody else was busy; steps do not."""
    table = CostTable(SIZES)
    table.seed(1, 256, (0.4, 0.5, 0.6, 2.7, 2.8))
    for nodes in SIZES:
        for _ in range(RECENT):
            table.learn(1, 1, nodes, 4.0)
    for context in (1, 300, 5000):
        costs = table.at(1, context).verify
        assert max(costs) < 1.1 * min(costs), costs


def test_a_pause_in_a_step_is_no_cost() -> None:
    table = CostTable(SIZES)
    for i in range(40):
        table.learn(1, 1, 4, 7.0 if i % 5 == 0 else 0.002)
    assert table.at(1, 1).of(4) == pytest.approx(0.002)
    assert all(cost > 0 for cost in table.at(1, 1).verify)
    (known,) = table.known()
    assert known["steps"] == [0, 0, RECENT, 0, 0]


def test_trust_forgets() -> None:
    trust = Trust(memory=50)
    assert trust.ratio == 1
    for _ in range(200):
        trust.fade()
        trust.add(4.0, 1.0)
    assert trust.ratio == pytest.approx(0.25, abs=0.02)
    for _ in range(400):
        trust.fade()
    assert trust.ratio > 0.9


def test_a_chain_is_taken_where_trees_disappoint() -> None:
    costs = Costs(0.0, (1, 2, 3), (1.0, 1.1, 1.2))
    tree, straight = [0.6, 0.3, 0.3], [0.6, 0.3, 0.1]
    assert not tree_or_chain(tree, straight, costs, trust=(1, 1)).chain
    assert tree_or_chain(tree, straight, costs, trust=(0.5, 1)).chain
    assert tree_or_chain(straight, straight, costs, trust=(1, 1)).chain


@pytest.mark.parametrize("slope", [0.002, 0.05, 0.3])
@pytest.mark.parametrize("calibration", [1.0, 3.0])
def test_auto_is_as_good_as_the_better_one(slope: float, calibration: float) -> None:
    """Tokens per second of what is chosen, from the marginals of earlier steps, against any fixed size.

    ``calibration``: how much flatter the target's marginals are than the drafter believes.
    """
    rng, depth, width = random.Random(1), 7, 6
    table, trust, seconds = CostTable(SIZES), (Trust(), Trust()), {n: 1 + slope * n for n in SIZES}
    table.seed(1, 256, tuple(seconds.values()))
    before: tuple[list[float], list[float]] | None = None
    tokens, spent = dict.fromkeys(["auto", *SIZES, "chain"], 0.0), dict.fromkeys(["auto", *SIZES, "chain"], 0.0)
    for _ in range(600):
        logits = [[rng.gauss(0, 2) for _ in range(width)] for _ in range(depth)]
        believed = [softmax(row) for row in logits]
        marginals = [sorted(enumerate(map(math.log, row)), key=lambda x: -x[1]) for row in believed]
        target = [rng.choices(range(width), softmax([x / calibration for x in row]))[0] for row in logits]
        full = best_first.build(-1, marginals, SIZES[-1])
        straight = chain([-1, *(row[0][0] for row in marginals)])
        probability = [1.0]
        for node in range(1, len(full.tokens)):
            own = believed[full.depths()[node] - 1][full.tokens[node]]
            probability.append(probability[full.parents[node]] * own)
        known = probability[1:], list(accumulate((math.exp(row[0][1]) for row in marginals), lambda a, b: a * b))
        picked = tree_or_chain(*before, table.at(1, 1), trust=(trust[0].ratio, trust[1].ratio)) if before else None
        before = (blend(before[0], known[0]), blend(before[1], known[1])) if before else known

        def accepted(tree: object, nodes: int, target: list[int] = target) -> int:
            depths = tree.depths()  # type: ignore[attr-defined]
            choices = [target[d] if d < depth else -2 for d in depths]
            return sum(n <= nodes for n in walk(tree, choices)) - 1  # type: ignore[arg-type]

        for n in SIZES:
            tokens[n] += 1 + accepted(full, n)
            spent[n] += seconds[n]
        tokens["chain"] += 1 + accepted(straight, 7)
        spent["chain"] += seconds[7]
        if picked is not None:
            size = next(n for n in SIZES if n >= max(picked.nodes, 1))
            got = accepted(straight if picked.chain else full, size)
            tokens["auto"] += 1 + got
            spent["auto"] += seconds[size]
            for one in trust:
                one.fade()
            trust[int(picked.chain)].add(sum(known[int(picked.chain)][:size]), got)
            table.learn(1, 1, size, seconds[size])
    rates = {name: tokens[name] / spent[name] for name in tokens}
    assert rates["auto"] >= 0.99 * rates["chain"]
    assert rates["auto"] >= 0.97 * max(rates.values()), rates


def softmax(row: list[float]) -> list[float]:
    top = [math.exp(x - max(row)) for x in row]
    return [x / sum(top) for x in top]
